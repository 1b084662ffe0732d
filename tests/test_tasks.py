"""Prompts hold what the answers say, and train and test never share a fact or a file."""
import hashlib
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from branchreplay import tasks, tokenizer
from branchreplay.config import UserError

FACT = re.compile(r'(?<=\n)#([A-H])=(\d)\n')


@pytest.fixture(scope='module')
def needle():
  return tasks.make_task('needle', 1024)


def check_example(task, split, index, seed):
  """Checks an example against what can be read in its prompt; returns its facts in order."""
  item = tasks.example(task, split, index, seed)
  assert item.prompt.dtype == item.answer.dtype == np.int32
  assert item.prompt.shape == (task.prompt_len,)
  assert item.answer.shape == (2,) and item.answer[1] == tasks.STOP_TOKEN == 10
  text = item.prompt.astype(np.uint8).tobytes().decode('latin-1')
  document, question = text[:-4], text[-4:]
  matches = list(FACT.finditer(document))
  facts = {match[1]: match[2] for match in matches}
  assert len(matches) == len(facts) == 6
  assert len(re.findall('#[A-H]=', text)) == 7  # the facts and the question, nothing accidental
  assert re.fullmatch('\n#[A-H]=', question)
  assert tokenizer.decode(item.answer) == facts[question[2]] + '\n'
  assert item.depth == (document.index(question) + 1) / len(document)
  assert 0 < item.depth < 1
  total = sum(('ABCDEFGH'.index(letter) + 1) * int(digit) for letter, digit in facts.items())
  assert (total % 5 == 0) == (split == 'test')
  return list(facts.items())


@pytest.mark.parametrize('split', tasks.SPLITS)
@pytest.mark.parametrize('name', tasks.TASKS)
@pytest.mark.parametrize('prompt_len', [tasks.MIN_PROMPT_LEN, 64, 257, 1024, 4096])
def test_example(needle, name, prompt_len, split):
  task = tasks.make_task(name, prompt_len, needle.corpora)
  for index in range(8):
    check_example(task, split, index, seed=0)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(name=st.sampled_from(tasks.TASKS), split=st.sampled_from(tasks.SPLITS),
                  prompt_len=st.integers(tasks.MIN_PROMPT_LEN, 3000),
                  index=st.integers(0, 2**40), seed=st.integers(0, 2**40))
def test_any_example_and_its_warmup(needle, name, split, prompt_len, index, seed):
  task = tasks.make_task(name, prompt_len, needle.corpora)
  facts = check_example(task, split, index, seed)
  item = tasks.example(task, split, index, seed)
  warmup = tasks.warmup_example(task, split, index, seed)
  np.testing.assert_array_equal(warmup.prompt, item.prompt[:-4])
  assert [tokenizer.decode(branch.tokens) for branch in warmup.branches] == [
      f'\n#{letter}={digit}\n' for letter, digit in facts]
  for branch in warmup.branches:
    assert branch.tokens.dtype == np.int32 and branch.mask.dtype == np.float32
    assert branch.mask.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_document_longer_than_the_corpus_reads_on_from_its_beginning():
  corpus = b'one\ntwo\nthree\n'
  task = tasks.make_task('needle', 300, {'train': corpus, 'test': corpus})
  text = tokenizer.decode(tasks.warmup_example(task, 'train', 0, 0).prompt)
  haystack = FACT.sub('', text)
  assert len(haystack) == 300 - 4 - 30
  assert haystack.startswith('\n') and haystack in (corpus * 30).decode()


def test_needle_reads_the_split_it_is_asked_for(needle):
  task = tasks.make_task('needle', 300, needle.corpora)
  for split in tasks.SPLITS:
    for index in range(20):
      document = tasks.warmup_example(task, split, index, 0).prompt.astype(np.uint8).tobytes()
      haystack = re.sub(rb'(?<=\n)#[A-H]=\d\n', b'', document)
      assert haystack in needle.corpora[split] + needle.corpora[split][:300]


def test_splits_share_no_file():
  train, test = tasks.source_files('train'), tasks.source_files('test')
  assert len(train) > len(test) > 20
  assert sorted(train + test) == sorted(set(train + test))
  assert not any('site-packages' in path for path in train + test)


@pytest.mark.parametrize('name', tasks.TASKS)
def test_splits_share_no_set_of_facts(needle, name):
  task = tasks.make_task(name, 64, needle.corpora)
  seen = {split: {tuple(sorted(FACT.findall(tokenizer.decode(tasks.warmup_example(task, split, i, 0).prompt))))
                  for i in range(500)} for split in tasks.SPLITS}
  assert not seen['train'] & seen['test'] and len(seen['train']) > 490
  assert tasks.split_of([('A', 5), ('B', 0), ('C', 1), ('D', 3)]) == 'test'  # 5 + 0 + 3 + 12 = 20
  assert tasks.split_of([('A', 5), ('B', 0), ('C', 1), ('D', 2)]) == 'train'


def test_corpus_is_capped_and_holds_no_fact(needle):
  for split, corpus in needle.corpora.items():
    assert 10**6 < len(corpus) and corpus.endswith(b'\n')
    assert not re.search(rb'#[A-H]=', corpus)
    assert corpus == tasks.load_corpus(split)
    capped = tasks.load_corpus(split, max_bytes=20_000)
    assert 20_000 <= len(capped) < len(corpus) and corpus.startswith(capped)


def test_accidental_facts_are_taken_out_of_the_source(tmp_path, monkeypatch):
  for i in range(10):
    (tmp_path / f'{i}.py').write_bytes(b'#A=1\nx = "#H=2"\n#I=3 stays\n# no newline at the end')
  monkeypatch.setattr(tasks.sysconfig, 'get_path', lambda _: str(tmp_path))
  assert tasks.load_corpus('test') == 2 * (
      b'%A=1\nx = "%H=2"\n#I=3 stays\n# no newline at the end\n')
  monkeypatch.setattr(tasks.sysconfig, 'get_path', lambda _: str(tmp_path / 'missing'))
  with pytest.raises(UserError, match='use the task recall'):
    tasks.make_task('needle', 64)


@pytest.mark.parametrize('name', tasks.TASKS)
def test_examples_are_random_access_and_differ(needle, name):
  task = tasks.make_task(name, 200, needle.corpora)
  again = tasks.make_task(name, 200)
  seen = set()
  for split, index, seed in [('train', 0, 0), ('train', 1, 0), ('train', 0, 1), ('test', 0, 0)]:
    item, other = (tasks.example(t, split, index, seed) for t in (task, again))
    np.testing.assert_array_equal(item.prompt, other.prompt)
    np.testing.assert_array_equal(item.answer, other.answer)
    assert item.depth == other.depth
    seen.add(item.prompt.tobytes())
  assert len(seen) == 4


def test_depths_letters_and_digits_are_spread(needle):
  items = [tasks.example(needle, 'train', index, 0) for index in range(1000)]
  depths = np.histogram([item.depth for item in items], bins=5, range=(0, 1))[0]
  letters = np.bincount([item.prompt[-2] - ord('A') for item in items], minlength=8)
  digits = np.bincount([item.answer[0] - ord('0') for item in items], minlength=10)
  assert depths.min() > 140 and depths.max() < 270
  assert letters.min() > 85 and letters.max() < 170
  assert digits.min() > 60 and digits.max() < 150


def test_recall_is_the_same_on_every_machine():
  task = tasks.make_task('recall', 257)
  item = tasks.example(task, 'train', 0, 0)
  assert tokenizer.decode(item.prompt[:27]) == '\n#C=1\ntropzhwsakxoautwecxao'
  assert tokenizer.decode(item.prompt[-4:]) == '\n#A='
  assert tokenizer.decode(item.answer) == '6\n'
  golden = {'train': '2b45fe3a75528b3d96931e3a14376a3ddf936d535dbc29f6b9862b0ca807d474',
            'test': '8b263415786012c991c96186ab033af5120fdf20e5d8a1cd928c363c4a23b1e0'}
  for split, digest in golden.items():
    prompts = [tasks.example(task, split, index, 7).prompt for index in range(8)]
    data = b''.join(prompt.astype('<i4').tobytes() for prompt in prompts)
    assert hashlib.sha256(data).hexdigest() == digest


@pytest.mark.parametrize('response, reward', [
    ('6\n', 1.0), ('6\n99', 1.0), ('6\n6\n', 1.0), ('6', 0.0), ('', 0.0), ('\n6\n', 0.0),
    ('5\n', 0.0), ('66\n', 0.0), ('6 \n', 0.0)])
def test_exact_match(response, reward):
  prompt, answer = tokenizer.encode('\n#A='), tokenizer.encode('6\n')
  result = tasks.exact_match(prompt, tokenizer.encode(response), answer)
  assert type(result) is float and result == reward


def test_tokenizer():
  tokens = tokenizer.encode('aé\n')
  assert tokens.dtype == np.int32 and tokens.tolist() == [97, 195, 169, 10]
  assert tokenizer.decode(tokens) == 'aé\n'
  assert tokenizer.encode(bytes(range(256))).tolist() == list(range(tokenizer.VOCAB_SIZE))
  assert tokenizer.decode([97, 255]) == 'a\ufffd' and tokenizer.decode([]) == ''
  for token in (-1, 256):
    with pytest.raises(UserError, match=f'token {token} is not a byte'):
      tokenizer.decode([97, token])


def test_errors():
  with pytest.raises(UserError, match='unknown task .maze.; the tasks are needle, recall'):
    tasks.make_task('maze', 1024)
  with pytest.raises(UserError, match='prompt_len=34 .* use at least 35'):
    tasks.make_task('recall', 34)
  task = tasks.make_task('recall', 64)
  for call in (tasks.example, tasks.warmup_example):
    with pytest.raises(UserError, match='unknown split .dev.; use train or test'):
      call(task, 'dev', 0, 0)
    with pytest.raises(UserError, match='index=-1 and seed=0 must not be negative'):
      call(task, 'train', -1, 0)
  with pytest.raises(UserError, match='unknown split'):
    tasks.load_corpus('dev')
