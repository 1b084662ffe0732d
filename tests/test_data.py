"""JSONL prompts, tokenizers and rewards: what they read, and their one-sentence refusals."""
import json

import numpy as np
import pytest

from branchreplay import data, rewards, tokenizer
from branchreplay.config import UserError


def write(path, *records):
  path.write_text(''.join((r if isinstance(r, str) else json.dumps(r)) + '\n' for r in records))
  return path


def numbered(path, count):
  return write(path, *({'prompt': f'p{i}', 'answer': str(i)} for i in range(count)))


def test_every_pass_has_every_record_once_and_any_index_is_found_again(tmp_path):
  held = data.open_jsonl(numbered(tmp_path / 'a.jsonl', 7), 'answer')
  stream = [data.record(held, i, seed=3)['answer'] for i in range(21)]
  passes = [stream[i:i + 7] for i in (0, 7, 14)]
  assert all(sorted(p) == [str(i) for i in range(7)] for p in passes) and passes[0] != passes[1]
  again = data.open_jsonl(tmp_path / 'a.jsonl', 'answer')
  assert data.record(again, 16, seed=3)['answer'] == stream[16]
  assert [data.record(held, i, seed=4)['answer'] for i in range(7)] != passes[0]
  assert [data.record(held, i, seed=None)['answer'] for i in range(8)] == [*map(str, range(7)), '0']


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path):
  path = write(tmp_path / 'a.jsonl', {'prompt': 'a', 'answer': '1'}, '', '  ', {'prompt': 'é', 'answer': '2'})
  held = data.open_jsonl(path, 'answer')
  assert data.record(held, 1, None) == {'prompt': 'é', 'answer': '2', 'where': f'{path}, line 4'}


def test_held_out_records_are_not_trained_on(tmp_path):
  train, test = data.hold_out(data.open_jsonl(numbered(tmp_path / 'a.jsonl', 25), 'answer'))
  answers = lambda d: {data.record(d, i, None)['answer'] for i in range(d.lines.size)}
  assert answers(test) == {'0', '10', '20'} and not answers(train) & answers(test)
  assert len(answers(train)) == 22


@pytest.mark.parametrize('line, kind, sentence', [
    ('{"prompt": ', 'answer', 'line 2: no JSON'), ('[1]', 'answer', 'line 2: list instead of an object'),
    ('{"answer": "1"}', 'answer', 'line 2: the prompt is empty or missing'),
    ('{"prompt": "", "answer": "1"}', 'answer', 'line 2: the prompt is empty or missing'),
    ('{"prompt": [{"role": "user"}], "answer": "1"}', 'answer', 'line 2: the prompt is empty or missing'),
    ('{"prompt": "a"}', 'answer', 'line 2: "answer" is missing'),
    ('{"prompt": "a", "answer": 3}', 'answer', 'line 2: "answer" must be a text'),
    ('{"trajectories": [{"messages": [{"role": "user", "content": "a"}]}]}', 'trees', 'line 2: give "trajectories"'),
    ('{"trajectories": [{"messages": [], "reward": 1}]}', 'trees', 'line 2: give "trajectories"'),
    ('{"tree": {"messages": [{"role": "user", "content": "a"}], "children": [1]}}', 'trees', 'line 2: give "trajectories"'),
    ('{"tree": {"messages": [{"role": "user", "content": "a"}]}}', 'trees', 'line 2: give "trajectories"'),
    ('{"prompt": "a", "chosen": "b"}', 'pairs', 'line 2: "rejected" is missing'),
    ('{"prompt": "a", "responses": ["b"], "rewards": [1, 2]}', 'offline', 'line 2: responses are texts and rewards'),
    ('{"prompt": "a", "responses": ["b"], "rewards": ["1"]}', 'offline', 'line 2: responses are texts and rewards'),
    ('{"prompt": "a", "responses": ["b"], "rewards": [1%s]}' % ('0' * 400), 'offline', 'line 2: responses are texts and rewards'),
    ('{"trajectories": [{"messages": [{"role": "user", "content": "a"}], "reward": 1%s}]}' % ('0' * 400), 'trees',
     'line 2: give "trajectories"'),
    ('"\ud800"', 'answer', 'line 2')])
def test_malformed_lines_are_named(tmp_path, line, kind, sentence):
  good = {'prompt': 'a', 'answer': '1', 'responses': ['b'], 'rewards': [1], 'chosen': 'b', 'rejected': 'c',
          'trajectories': [{'messages': [{'role': 'assistant', 'content': 'a'}], 'reward': 1}]}
  path = tmp_path / 'a.jsonl'
  path.write_bytes(json.dumps(good).encode() + b'\n' + line.encode('utf-8', 'surrogatepass') + b'\n')
  with pytest.raises(UserError, match=sentence):
    data.open_jsonl(path, kind)


def test_files_that_are_not_there_or_empty(tmp_path):
  with pytest.raises(UserError, match='cannot be read'):
    data.open_jsonl(tmp_path / 'a.jsonl', 'answer')
  with pytest.raises(UserError, match='holds no records'):
    data.open_jsonl(write(tmp_path / 'b.jsonl', ''), 'answer')
  with pytest.raises(UserError, match='one record'):
    data.hold_out(data.open_jsonl(numbered(tmp_path / 'c.jsonl', 1), 'answer'))


def test_long_prompts_are_refused_or_cut_on_the_left():
  value = {'prompt': 'abcdef', 'where': 'here'}
  tokens, cut = data.encode_prompt(tokenizer.BYTES, value, 4, 'truncate')
  assert tokenizer.decode(tokens) == 'cdef' and cut
  assert data.encode_prompt(tokenizer.BYTES, value, 6, 'refuse')[1] is False
  with pytest.raises(UserError, match='here: the prompt has 6 tokens, the capacity is 4'):
    data.encode_prompt(tokenizer.BYTES, value, 4, 'refuse')
  with pytest.raises(UserError, match='no chat template'):
    data.encode_prompt(tokenizer.BYTES, {'prompt': [{'role': 'user', 'content': 'a'}], 'where': 'here'}, 9, 'refuse')


def test_a_checkpoints_tokenizer(tokenizer_folder):
  held = tokenizer.load(tokenizer_folder, 512)
  tokens = held.encode('the fact is é')
  assert held.decode(tokens) == 'the fact is é' and 0 < tokens.size < 13 and tokens.dtype == np.int32
  assert held.stop_token == 0 and held.vocab_size <= 300
  text = held.chat([{'role': 'user', 'content': 'hi'}])
  assert text == '[user]hi<|end|>[assistant]' and held.encode(text)[-1] != 0
  assert 0 in held.encode(text)  # a special token in a template counts as one


def test_tokenizers_that_do_not_fit(tokenizer_folder, tmp_path):
  with pytest.raises(UserError, match='token ids up to .* a vocabulary of 100'):
    tokenizer.load(tokenizer_folder, 100)
  with pytest.raises(UserError, match='has no tokenizer.json'):
    tokenizer.load(tmp_path / 'absent', 512)
  (tokenizer_folder / 'tokenizer.json').write_text('{"version": ')
  with pytest.raises(UserError, match='is no tokenizer'):
    tokenizer.load(tokenizer_folder, 512)


@pytest.mark.parametrize('template, sentence', [
    ('{% for %}', 'is malformed'), ("{{ raise_exception('no system') }}", 'refuses a prompt .no system'),
    ("{{ ''.__class__.__mro__ }}{{ messages.__class__.__subclasses__() }}", 'refuses a prompt')])
def test_chat_templates_run_in_a_sandbox(tokenizer_folder, template, sentence):
  (tokenizer_folder / 'chat_template.jinja').write_text(template)
  with pytest.raises(UserError, match=sentence):
    tokenizer.load(tokenizer_folder, 512).chat([{'role': 'user', 'content': 'hi'}])


@pytest.mark.parametrize('name, response, answer, want', [
    ('exact_match', ' 42\n', '42', 1), ('exact_match', '42.', '42', 0), ('contains', 'so it is 42.', '42', 1),
    ('contains', 'so', '42', 0), ('regex', 'abc123', r'^\w+\d$', 1), ('regex', 'abc', r'\d', 0),
    ('math_number', 'so 1,234.50 in all', 'the answer: 1234.5', 1), ('math_number', 'first 3, then 4', '3', 0),
    ('math_number', 'it is 1/2', '0.5', 1), ('math_number', 'none', '5', 0), ('math_number', '-3e2', '-300', 1)])
def test_rewards(name, response, answer, want):
  assert rewards.load(name)('', response, answer) == want


def test_rewards_of_the_users_own(tmp_path, monkeypatch):
  (tmp_path / 'my_rewards.py').write_text(
      'def length(prompt, response, answer): return -len(response)\ndef wrong(*_): raise KeyError("x")\n'
      'def text(*_): return "good"\n')
  monkeypatch.chdir(tmp_path)
  value = lambda name: rewards.evaluate(rewards.load(name), 'p', 'abc', 'a', 'data.jsonl, line 4, response 2')
  assert value('my_rewards:length') == -3.0
  with pytest.raises(UserError, match="line 4, response 2: the reward function raised KeyError"):
    value('my_rewards:wrong')
  with pytest.raises(UserError, match="line 4, response 2: the reward function returned 'good', no number"):
    value('my_rewards:text')


@pytest.mark.parametrize('name, sentence', [
    ('right', "unknown reward 'right'; use exact_match"), ('no_such_module:f', 'cannot be imported'),
    ('math:no_such', "module 'math' has no 'no_such'"), ('math:pi', 'is no function')])
def test_unknown_rewards(name, sentence):
  with pytest.raises(UserError, match=sentence):
    rewards.load(name)


@pytest.mark.parametrize('name, answer', [('regex', '('), ('math_number', 'none')])
def test_answers_that_a_reward_cannot_use(name, answer):
  with pytest.raises(UserError, match='here: the answer'):
    rewards.evaluate(rewards.load(name), 'p', 'abc', answer, 'here')


def test_a_nested_tree_is_its_trajectories():
  say = lambda content: [{'role': 'assistant', 'content': content}]
  tree = {'messages': say('a'), 'children': [
      {'messages': say('b'), 'reward': 1}, {'messages': say('c'), 'reward': 2, 'children': [{'messages': say('d'), 'reward': 3}]}]}
  found = data.trajectories({'tree': tree})
  assert [(''.join(m['content'] for m in r['messages']), r['reward']) for r in found] == [('ab', 1), ('ac', 2), ('acd', 3)]


def test_a_panic_of_the_tokenizers_library_is_one_sentence(tmp_path, capfd):
  model = {'type': 'BPE', 'vocab': {'a': 0, 'b': 1, 'ab': 2}, 'merges': [['a', 'b']], 'continuing_subword_prefix': 'long'}
  (tmp_path / 'tokenizer.json').write_text(json.dumps({'version': '1.0', 'added_tokens': [], 'model': model}))
  with pytest.raises(UserError, match='tokenizer.json is no tokenizer'):
    tokenizer.load(tmp_path, 300)
  assert capfd.readouterr().err == ''
