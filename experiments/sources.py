"""Where prompts and rewards come from: a built-in task, or a user's JSONL file."""
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from branchreplay import data, rewards, tasks, tokenizer, turns
from branchreplay.config import TrainConfig, UserError


class Example(NamedTuple):
  prompt: np.ndarray  # i32 [P]
  answer: Any  # text, the two responses of a pair, or (responses, rewards)
  text: str = ''  # of the prompt, for the reward
  where: str = ''  # file and line
  cut: bool = False  # whether the prompt was cut on the left


class Source(NamedTuple):
  example: Callable  # (split, index) -> Example or tasks.Example
  reward: Callable  # (example, response tokens) -> float
  stop_token: int  # ends a response; -1: none


def of_task(train: TrainConfig, prompt_len: int, corpora=None) -> Source:
  """Prompts of `prompt_len` tokens of the task --task."""
  task = tasks.make_task(train.task, prompt_len, corpora)
  return Source(lambda split, index: tasks.example(task, split, index, train.seed),
                lambda example, response: tasks.exact_match(example.prompt, response, example.answer),
                tasks.STOP_TOKEN)


def pick_tokenizer(train: TrainConfig, vocab_size: int) -> tokenizer.Tokenizer:
  """What --tokenizer names."""
  folder = train.tokenizer
  if folder == 'auto':
    folder = train.init if train.init and (Path(train.init) / 'tokenizer.json').is_file() else 'bytes'
  if folder != 'bytes':
    return tokenizer.load(folder, vocab_size)
  if vocab_size < tokenizer.VOCAB_SIZE:
    raise UserError(f'a vocabulary of {vocab_size} does not hold 256 bytes; give a --tokenizer folder.')
  return tokenizer.BYTES


def of_file(train: TrainConfig, tokens: tokenizer.Tokenizer, kind: str = 'answer') -> Source:
  """Prompts of --data_file, in an order shuffled by the seed; held-out ones in the file's order.

  kind: answer; pairs, whose examples' answers are the tokens of chosen and rejected; offline,
  where those of the training split are the tokens of the responses and their rewards; or trees,
  where they are (trajectories, rewards) and there is no prompt.
  """
  if train.long_prompts not in ('refuse', 'truncate'):
    raise UserError(f'unknown long_prompts {train.long_prompts!r}; use refuse or truncate.')
  reward = rewards.load(train.reward)
  held = data.open_jsonl(train.data_file, kind)
  splits = dict(zip(('train', 'test'), data.hold_out(held))) if not train.eval_file else {
      'train': held, 'test': data.open_jsonl(train.eval_file, 'answer' if kind == 'offline' else kind)}
  stop = [tokens.stop_token] if tokens.stop_token >= 0 else []

  def example(split, index):
    found = data.record(splits[split], index, train.seed if split == 'train' else None)
    if kind == 'trees':
      rows = data.trajectories(found)
      return Example(None, ([turns.encode_messages(tokens, r['messages'], found['where']) for r in rows],
                            [float(r['reward']) for r in rows]), where=found['where'])
    prompt, cut = data.encode_prompt(tokens, found, train.prompt_len, train.long_prompts)
    text = found['prompt'] if isinstance(found['prompt'], str) else tokens.chat(found['prompt'])
    response = lambda text: np.append(tokens.encode(text), stop).astype(np.int32)
    if kind == 'pairs':
      answer = [response(found[name]) for name in ('chosen', 'rejected')]
    elif kind == 'offline' and split == 'train':
      answer = [response(text) for text in found['responses']], np.array(found['rewards'], float)
    else:
      answer = found['answer']
    return Example(prompt, answer, text, found['where'], cut)

  def evaluate(example, response):
    value = rewards.evaluate(reward, example.text, tokens.decode(response), example.answer, example.where)
    if not np.isfinite(value) and not train.drop_nonfinite_rewards:
      raise UserError(f'{example.where}: the reward of the response {tokens.decode(response)!r} is {value}; '
                      'correct the reward function, or drop such responses with --drop_nonfinite_rewards.')
    return value

  return Source(example, evaluate, tokens.stop_token)
