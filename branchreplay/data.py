"""Prompts from a JSONL file: streamed, shuffled by a seed, found again by their number.

A line is an object with `prompt` (text, or chat messages with role and content) and

  answer                   text the reward function compares with
  responses, rewards       ready-made responses and their rewards (an offline group)
  chosen, rejected         a preference pair

or, instead of a prompt,

  trajectories             a tree: [{"messages": chat messages, "reward": number}, ...]
  tree                     the same, nested: {"messages": ..., "children": [nodes]}, with "reward" where a trajectory ends

Only the offsets of the lines are held; every line is read once when the file is opened,
so that a malformed one costs a second and not a night.
"""
import functools
import json
import math
import os
from pathlib import Path
import sys
from typing import NamedTuple

import numpy as np

from branchreplay.config import UserError
from branchreplay.tokenizer import Tokenizer, is_text

KINDS = {'answer': ('answer',), 'offline': ('responses', 'rewards'), 'pairs': ('chosen', 'rejected'), 'trees': ()}


class Dataset(NamedTuple):
  path: Path
  starts: np.ndarray  # i64 [records], where each line starts in the file
  lines: np.ndarray  # i64 [records], their line numbers, from 1


def open_jsonl(path: str | os.PathLike, kind: str) -> Dataset:
  """Reads `path` once and checks every record; blank lines are skipped.

  kind: what a record has beside its prompt, a key of KINDS. UserError names the line.
  """
  path, starts, lines, at = Path(path), [], [], 0
  try:
    with open(path, 'rb') as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          _check(_parse(path, number, line), f'{path}, line {number}', kind)
          starts.append(at)
          lines.append(number)
        at += len(line)
  except OSError as error:
    raise UserError(f'{path} cannot be read ({error.strerror}); name a JSONL file.')
  if not starts:
    raise UserError(f'{path} holds no records; write one JSON object a line.')
  return Dataset(path, np.array(starts, np.int64), np.array(lines, np.int64))


def hold_out(dataset: Dataset, every: int = 10) -> tuple[Dataset, Dataset]:
  """(the rest, every `every`th record); UserError where that leaves either empty."""
  held = np.arange(dataset.lines.size) % every == 0
  if held.all():
    raise UserError(f'{dataset.path} has one record, and evaluation needs another; name an --eval_file.')
  return tuple(Dataset(dataset.path, dataset.starts[rows], dataset.lines[rows]) for rows in (~held, held))


def record(dataset: Dataset, index: int, seed: int | None) -> dict:
  """Record `index` of an endless stream: every pass over the file in another order.

  The order is that of the seed alone, so a run taken up at `index` sees what it would
  have seen. seed None: the file's own order.
  """
  count = len(dataset.lines)
  epoch, place = divmod(index, count)
  row = place if seed is None else int(_order(count, seed, epoch)[place])
  with open(dataset.path, 'rb') as file:
    file.seek(dataset.starts[row])
    line = file.readline()
  number = int(dataset.lines[row])
  return _parse(dataset.path, number, line) | {'where': f'{dataset.path}, line {number}'}


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(count)


def _parse(path, number: int, line: bytes) -> dict:
  try:
    value = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path}, line {number}: no JSON ({error}); write one JSON object a line.')
  if not isinstance(value, dict):
    raise UserError(f'{path}, line {number}: {type(value).__name__} instead of an object; '
                    'write {"prompt": ..., ...}.')
  return value


def _texts(value):
  """All strings in a JSON value."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, (dict, list)):
    for item in (*value, *value.values()) if isinstance(value, dict) else value:
      yield from _texts(item)


def trajectories(value: dict):
  """The record's trajectories; a nested tree's are the paths to its nodes that have a reward or no children."""
  if 'tree' not in value:
    return value.get('trajectories')
  found, todo = [], [([], value['tree'])]
  while todo:
    before, node = todo.pop()
    if not isinstance(node, dict) or not isinstance(node.get('messages'), list) or not isinstance(node.get('children', []), list):
      return None
    messages, children = before + node['messages'], node.get('children', [])
    if 'reward' in node or not children:
      found.append({'messages': messages, 'reward': node.get('reward')})
    todo += [(messages, child) for child in reversed(children)]
  return found


def _is_chat(value) -> bool:
  return isinstance(value, list) and bool(value) and all(
      isinstance(m, dict) and isinstance(m.get('role'), str) and isinstance(m.get('content'), str) for m in value)


def _is_number(value) -> bool:
  """Whether a JSON value is a number that a float can hold (NaN and infinities are)."""
  return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


def _check(value: dict, where: str, kind: str) -> None:
  """UserError unless the record has a prompt and what `kind` asks for."""
  if not all(is_text(text) for text in _texts(value)):
    raise UserError(f'{where}: a text holds half of a surrogate pair, which is no character; write it as UTF-8.')
  if kind == 'trees':
    rows = trajectories(value)
    if not (isinstance(rows, list) and rows and all(
        isinstance(r, dict) and _is_chat(r.get('messages')) and _is_number(r.get('reward')) and math.isfinite(r['reward']) for r in rows)):
      raise UserError(f'{where}: give "trajectories", a list of {{"messages": [{{"role": ..., "content": ...}}, ...], "reward": '
                      'number}, or "tree", a node {"messages": [...], "children": [nodes]} with "reward" where a trajectory ends.')
    return
  prompt = value.get('prompt')
  if not (_is_chat(prompt) or (isinstance(prompt, str) and prompt)):
    raise UserError(f'{where}: the prompt is empty or missing; it is a text, or a list of '
                    '{"role": ..., "content": ...}.')
  for key in KINDS[kind]:
    if key not in value:
      raise UserError(f'{where}: "{key}" is missing; add it.')
    right = isinstance(value[key], list) if kind == 'offline' else isinstance(value[key], str)
    if not right:
      raise UserError(f'{where}: "{key}" must be {"a list" if kind == "offline" else "a text"}.')
  if kind == 'offline':
    responses, rewards = value['responses'], value['rewards']
    if not responses or len(responses) != len(rewards) or not all(map(_is_number, rewards)) or not all(isinstance(r, str) for r in responses):
      raise UserError(f'{where}: responses are texts and rewards numbers, as many of each, at least one.')


def encode_prompt(tokenizer: Tokenizer, value: dict, longest: int, long_prompts: str) -> tuple[np.ndarray, bool]:
  """Tokens [P] of a record's prompt, and whether it was cut.

  long_prompts: what happens above `longest` tokens: refuse (UserError) or truncate
  (the last ones are kept).
  """
  prompt = value['prompt']
  if not isinstance(prompt, str):
    if tokenizer.chat is None:
      raise UserError(f'{value["where"]}: the prompt is chat messages, and the tokenizer has no chat template; '
                      'give the prompt as text.')
    prompt = tokenizer.chat(prompt)
  tokens = tokenizer.encode(prompt)
  if not tokens.size:
    raise UserError(f'{value["where"]}: the prompt has no tokens; give it a text.')
  if tokens.size <= longest:
    return tokens, False
  if long_prompts == 'refuse':
    raise UserError(f'{value["where"]}: the prompt has {tokens.size} tokens, the capacity is {longest}; raise '
                    '--prompt_len, or cut such prompts on the left with --long_prompts=truncate.')
  return tokens[-longest:], True
