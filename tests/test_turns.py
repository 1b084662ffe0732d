"""Trajectories of several turns: tokens and masks of conversations, advantages a turn at a time."""
import numpy as np
import pytest

from branchreplay import tasks, tokenizer, turns
from branchreplay.config import UserError
from branchreplay.turns import Trajectory

TALK = [{'role': 'user', 'content': 'the fact'}, {'role': 'assistant', 'content': 'is'},
        {'role': 'tool', 'content': 'three'}, {'role': 'assistant', 'content': 'the answer'}]


def spell(*parts) -> Trajectory:
  """Tokens of texts in turn: first not trained, then trained, ..."""
  rows = [tokenizer.encode(p) for p in parts]
  return Trajectory(np.concatenate(rows), np.concatenate([np.full(len(r), i % 2.0) for i, r in enumerate(rows)]))


def test_turn_advantages_by_hand():
  rows = [spell('', 'a', '__', 'x'), spell('', 'a', '__', 'y'), spell('', 'b', '..', 'x'), spell('', 'b', '..', 'x')]
  got = turns.turn_advantages(rows, [1, 0, 0, 0])
  # First turn: rewards 1 0 0 0, mean 1/4, std sqrt(3)/4; `a` is worth 1/2 and `b` 0.
  a, b = 1 / np.sqrt(3), -1 / np.sqrt(3)
  # Second turn behind `a`: 1 and 0 about 1/2 with std 1/2; behind `b` all are equal.
  for row, want in zip(got, ([a, 0, 0, 1], [a, 0, 0, -1], [b, 0, 0, 0], [b, 0, 0, 0])):
    np.testing.assert_allclose(row, want, atol=1e-12)


def test_one_turn_is_grpo():
  from branchreplay.advantages import group_advantages
  rewards = np.array([0.5, 1, 0, 0])
  rows = [spell('p', word) for word in ('ab', 'ac', 'd', 'e')]
  for row, want in zip(turns.turn_advantages(rows, rewards), group_advantages(rewards)):
    np.testing.assert_allclose(row[1:], want)
    assert row[0] == 0


def test_a_lone_trajectory_and_one_without_turns_have_none():
  assert not turns.turn_advantages([spell('a', 'b')], [3.0])[0].any()
  assert not any(a.any() for a in turns.turn_advantages([spell('a'), spell('b')], [0.0, 1.0]))


def test_split_prompt():
  prompt, rest = turns.split_prompt([spell('abc', 'x', 'y'), spell('abd', 'x')])
  assert tokenizer.decode(prompt) == 'ab'
  assert [tokenizer.decode(t.tokens) for t in rest] == ['cxy', 'dx']
  prompt, rest = turns.split_prompt([spell('ab', 'cd'), spell('ab', 'cd')])
  assert tokenizer.decode(prompt) == 'ab' and rest[1].mask.tolist() == [1, 1]


def test_messages_as_bytes():
  got = turns.encode_messages(tokenizer.BYTES, TALK + [{'role': 'user', 'content': 'not read'}], 'here')
  assert tokenizer.decode(got.tokens) == 'the factis\nthreethe answer\n'
  assert tokenizer.decode(got.tokens[got.mask > 0]) == 'is\nthe answer\n'


def test_messages_by_a_chat_template(tokenizer_folder):
  tokens = tokenizer.load(tokenizer_folder, 400)
  got = turns.encode_messages(tokens, TALK, 'here')
  # The template of conftest.py: [role]content<|end|> for each message.
  want = tokens.encode('[user]the fact<|end|>[assistant]is<|end|>[tool]three<|end|>[assistant]the answer<|end|>')
  assert tokens.decode(got.tokens) == tokens.decode(want)
  assert tokens.decode(got.tokens[got.mask > 0]) == 'isthe answer'
  assert (got.tokens[got.mask > 0] == tokens.stop_token).sum() == 2


def test_messages_that_cannot_be_trained_on(tokenizer_folder):
  with pytest.raises(UserError, match='line 3: no message has the role assistant'):
    turns.encode_messages(tokenizer.BYTES, TALK[:1], 'line 3')
  fickle = tokenizer.BYTES._replace(chat=lambda messages: f'{len(messages)} messages')
  with pytest.raises(UserError, match='line 3: the chat template changes what stands before message 3'):
    turns.encode_messages(fickle, TALK, 'line 3')


@pytest.mark.parametrize('name', tasks.TASKS)
def test_lookup_example(name):
  task = tasks.make_task(name, 256)
  for index in range(20):
    found = tasks.lookup_example(task, 'train', index, 0, 48)
    text, page = tokenizer.decode(found.prompt), int(chr(found.call[0]))
    assert len(found.prompt) == 256 and f'{text[-4:]}{page}\n'.encode() in text.encode()
    assert len(found.results) == tasks.PAGES and {len(r) for r in found.results} == {48}
    asked = {tokenizer.decode(r)[-4:] for r in found.results}
    assert len(asked) == 1 and asked.pop()[1:3] not in text  # of a letter the document lacks
    answers = [tokenizer.decode(r).split(tokenizer.decode(r)[-4:])[1][0] for r in found.results]
    assert sorted(answers) == list('0123456789') and answers[page] == chr(found.answer[0])
    np.testing.assert_array_equal(tasks.open_page(found, found.call), found.results[page])


@pytest.mark.parametrize('call', ['', '3', 'x\n', '33\n', '\n'])
def test_a_malformed_call_opens_nothing(call):
  found = tasks.lookup_example(tasks.make_task('recall', 64), 'train', 0, 0, 16)
  assert tasks.open_page(found, tokenizer.encode(call)).size == 0


def test_a_page_too_short():
  with pytest.raises(UserError, match='page_len=9 cannot hold a fact and a question; use at least 10'):
    tasks.lookup_example(tasks.make_task('recall', 64), 'train', 0, 0, 9)
