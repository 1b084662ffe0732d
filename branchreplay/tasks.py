"""Prompts and rewards: find one of six facts hidden in a long document.

A document is a haystack with six lines `#K=d` (K a letter, d a digit) put in at
random line starts. The prompt is the document and the question `\\n#K=`; the
answer is `d\\n`, whose newline is the stop token. The haystack begins with a
newline, so every fact stands in the prompt exactly as its question and answer do.

    needle  the haystack is source text of the running Python's standard library
    recall  the haystack is random letters, the same on every machine

Every example is a function of (task, split, index, seed): a data cursor is an
integer, and a resumed run sees what it would have seen.
"""
import dataclasses
import os
import re
import sysconfig
from collections.abc import Mapping

import numpy as np

from branchreplay.config import UserError
from branchreplay.tokenizer import encode

TASKS = ('needle', 'recall')
SPLITS = ('train', 'test')
LETTERS = 'ABCDEFGH'
FACTS = 6  # facts in a document, each of another letter
PAGES = 10  # of a lookup in two turns
SPLIT_PERIOD = 5  # every fifth file and every fifth set of facts is for the test
STOP_TOKEN = ord('\n')
FACT_LEN = len('#K=d\n')
QUESTION_LEN = len('\n#K=')
BRANCH_LEN = QUESTION_LEN + 2  # tokens of a warm-up branch: question, answer, stop
MIN_PROMPT_LEN = 1 + FACTS * FACT_LEN + QUESTION_LEN
CORPUS_BYTES = 4 * 2**20  # about as much text as a split reads
FILLER = np.frombuffer(b'abcdefghijklmnopqrstuvwxyz\n', np.uint8)
SKIPPED_FOLDERS = ('site-packages', 'dist-packages', '__pycache__', 'test', 'tests')


@dataclasses.dataclass(frozen=True)
class Task:
  """What examples are made of; `make_task` builds and checks it."""
  name: str
  prompt_len: int  # bytes of a document and its question together, P
  corpora: Mapping[str, bytes] = dataclasses.field(repr=False)  # split -> text; recall: empty


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """A prompt that ends with a question, and its only right response."""
  prompt: np.ndarray  # [P] int32
  answer: np.ndarray  # [2] int32: the digit, the stop token
  depth: float  # where the asked fact begins, as a fraction of the document, 0 <= depth < 1


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
  """A continuation of a document and the tokens of it that a loss counts."""
  tokens: np.ndarray  # [6] int32: the question, the answer
  mask: np.ndarray  # [6] float32: 1 on the answer, 0 on the question


@dataclasses.dataclass(frozen=True, eq=False)
class WarmupExample:
  """A document with all its questions and answers, for supervised warm-up."""
  prompt: np.ndarray  # [P - 4] int32: the document alone
  branches: tuple[Branch, ...]  # six, in the order of their facts in the document


def make_task(name: str, prompt_len: int, corpora: Mapping[str, bytes] | None = None) -> Task:
  """The task `name` with prompts of `prompt_len` bytes.

  `corpora` are those of an earlier needle task, to read the disk only once.
  Raises UserError for an unknown name or a prompt too short for its facts.
  """
  if name not in TASKS:
    raise UserError(f'unknown task {name!r}; the tasks are {", ".join(TASKS)}.')
  if prompt_len < MIN_PROMPT_LEN:
    raise UserError(f'prompt_len={prompt_len} cannot hold {FACTS} facts and a question; '
                    f'use at least {MIN_PROMPT_LEN}.')
  if name == 'recall':
    corpora = {}
  elif not corpora:
    corpora = {split: load_corpus(split) for split in SPLITS}
  return Task(name, prompt_len, corpora)


def source_files(split: str) -> list[str]:
  """Paths of the standard library's .py files that belong to `split`, sorted."""
  check_split(split)
  root = sysconfig.get_path('stdlib')
  paths = []
  for folder, subfolders, names in os.walk(root):
    subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
    paths += [os.path.join(folder, name) for name in names if name.endswith('.py')]
  paths = sorted(path for path in paths if os.path.isfile(path))
  is_test = split == 'test'
  return [path for i, path in enumerate(paths) if (i % SPLIT_PERIOD == 0) == is_test]


def load_corpus(split: str, max_bytes: int = CORPUS_BYTES) -> bytes:
  """The files of `split` one after another, up to the one that reaches `max_bytes`.

  Every file ends with a newline and none has the text of a fact in it. Raises
  UserError for an unknown split or a Python without its source.
  """
  texts, total = [], 0
  for path in source_files(split):
    if total >= max_bytes:
      break
    with open(path, 'rb') as file:
      texts.append(file.read() + b'\n')
    total += len(texts[-1])
  if not texts:
    raise UserError('this Python has no standard-library source files; use the task recall.')
  return re.sub(rb'#(?=[A-H]=)', b'%', b''.join(texts))


def check_split(split: str) -> None:
  """Raises UserError unless `split` is train or test."""
  if split not in SPLITS:
    raise UserError(f'unknown split {split!r}; use {" or ".join(SPLITS)}.')


def split_of(facts) -> str:
  """The split that a document's facts, six (letter, digit), belong to.

  A fact is what one document says of a letter, so a document's facts go together:
  no assignment of digits to letters stands in both splits, and every fifth is a
  test assignment. (Single pairs are few: holding out some would tell a model
  which answers never to give.)
  """
  total = sum((LETTERS.index(letter) + 1) * digit for letter, digit in facts)
  return 'test' if total % SPLIT_PERIOD == 0 else 'train'


def example(task: Task, split: str, index: int, seed: int) -> Example:
  """Example number `index` of `split`; UserError for an unknown split."""
  document, facts, offsets, asked = _document(task, split, index, seed)
  letter, digit = facts[asked]
  return Example(prompt=encode(document + _question(letter)), answer=encode(f'{digit}\n'),
                 depth=offsets[asked] / len(document))


def warmup_example(task: Task, split: str, index: int, seed: int) -> WarmupExample:
  """The document of `example` with the same arguments, and its six branches."""
  document, facts, _, _ = _document(task, split, index, seed)
  mask = np.array([0.] * QUESTION_LEN + [1.] * 2, np.float32)
  return WarmupExample(prompt=encode(document), branches=tuple(
      Branch(encode(_question(letter) + f'{digit}\n'.encode()), mask) for letter, digit in facts))


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
  """A lookup in two turns: the document tells which page to open, the page holds the answer."""
  prompt: np.ndarray  # [P] int32, ends with a question whose answer is the page's number
  call: np.ndarray  # [2] int32, the only right call: the page's number, the stop token
  results: tuple[np.ndarray, ...]  # what the tool returns for each of the PAGES pages: [page_len] int32, ends with a question
  answer: np.ndarray  # [2] int32, to the question of the right page


def lookup_example(task: Task, split: str, index: int, seed: int, page_len: int) -> Lookup:
  """The document of `example` with ten pages behind it; each says another digit of a letter the document lacks.

  UserError for pages that cannot hold their fact and question.
  """
  if page_len < 1 + FACT_LEN + QUESTION_LEN:
    raise UserError(f'page_len={page_len} cannot hold a fact and a question; use at least {1 + FACT_LEN + QUESTION_LEN}.')
  document, facts, _, asked = _document(task, split, index, seed)
  rng = np.random.default_rng([seed, SPLITS.index(split), index, 1])
  letter = next(x for x in LETTERS if x not in [k for k, _ in facts])
  digits = rng.permutation(PAGES)
  results = []
  for digit in digits:
    text = _haystack(task, split, page_len - FACT_LEN - QUESTION_LEN, rng)
    starts = np.flatnonzero(np.frombuffer(text, np.uint8) == STOP_TOKEN) + 1
    at = int(rng.choice(starts))
    results.append(encode(text[:at] + f'#{letter}={digit}\n'.encode() + text[at:] + _question(letter)))
  asked_letter, page = facts[asked]
  return Lookup(encode(document + _question(asked_letter)), encode(f'{page}\n'), tuple(results),
                encode(f'{digits[page]}\n'))


def open_page(lookup: Lookup, call) -> np.ndarray:
  """What the tool returns for a call [length], a page's number and the stop token; nothing for anything else."""
  call = np.asarray(call)
  page = int(call[0]) - ord('0') if call.size == 2 and call[1] == STOP_TOKEN else -1
  return lookup.results[page] if 0 <= page < len(lookup.results) else np.zeros(0, np.int32)


def exact_match(prompt, response, answer) -> float:
  """1.0 if `response`, up to and with its first stop token, is `answer`, else 0.0.

  All three are token arrays [length]; what follows the stop token is not read,
  and the prompt is not needed.
  """
  del prompt
  response = np.asarray(response)
  stops = np.flatnonzero(response == STOP_TOKEN)
  end = stops[0] + 1 if stops.size else response.size
  return float(np.array_equal(response[:end], answer))


def _question(letter: str) -> bytes:
  return f'\n#{letter}='.encode()


def _document(task: Task, split: str, index: int, seed: int):
  """A document, its facts (letter, digit) and their offsets in order, and which is asked."""
  check_split(split)
  if index < 0 or seed < 0:
    raise UserError(f'index={index} and seed={seed} must not be negative; use 0 or more.')
  rng = np.random.default_rng([seed, SPLITS.index(split), index])
  letters = [LETTERS[i] for i in rng.permutation(len(LETTERS))[:FACTS]]
  facts = list(zip(letters, rng.integers(10, size=FACTS).tolist()))
  while split_of(facts) != split:
    facts = list(zip(letters, rng.integers(10, size=FACTS).tolist()))
  asked = int(rng.integers(FACTS))
  haystack = _haystack(task, split, task.prompt_len - QUESTION_LEN - FACTS * FACT_LEN, rng)
  line_starts = np.flatnonzero(np.frombuffer(haystack, np.uint8) == STOP_TOKEN) + 1
  places = np.sort(line_starts[rng.integers(len(line_starts), size=FACTS)])
  pieces = [haystack[:places[0]]]
  for (letter, digit), begin, end in zip(facts, places, [*places[1:], len(haystack)]):
    pieces += [f'#{letter}={digit}\n'.encode(), haystack[begin:end]]
  offsets = [int(place) + FACT_LEN * i for i, place in enumerate(places)]
  return b''.join(pieces), facts, offsets, asked


def _haystack(task: Task, split: str, length: int, rng: np.random.Generator) -> bytes:
  """`length` bytes that begin with a newline and hold no fact."""
  if task.name == 'recall':
    return b'\n' + FILLER[rng.integers(len(FILLER), size=length - 1)].tobytes()
  corpus = task.corpora[split]
  start = corpus.find(b'\n', int(rng.integers(len(corpus))))
  text = corpus[start:start + length]
  while len(text) < length:  # from the corpus's end on to its beginning
    text += corpus[:length - len(text)]
  return text
