"""Trajectories of several turns: from chat messages to tokens, and from rewards to turn-level advantages.

A turn is a run of trained tokens. Trajectories that agree up to a turn chose it in the same
situation, so its advantage is taken among them: no critic, as in GRPO, but a turn at a time.
"""
from typing import NamedTuple

import numpy as np

from branchreplay.advantages import all_equal
from branchreplay.config import UserError
from branchreplay.tokenizer import Tokenizer


class Trajectory(NamedTuple):
  tokens: np.ndarray  # i32 [length]
  mask: np.ndarray  # [length], 1 on what the agent said


def turn_advantages(trajectories: list[Trajectory], rewards) -> list[np.ndarray]:
  """Of each token: (value of its turn - mean) / std over the trajectories that agree up to the turn.

  A turn's value is the mean reward [G] of the trajectories that agree up to its end. 0 outside
  turns, and where all trajectories of a situation have equal rewards or there is but one.
  """
  rewards = np.asarray(rewards, np.float64)
  out = [np.zeros(len(t.tokens)) for t in trajectories]
  beginnings = {}  # tokens so far -> trajectories that begin with them
  alike = lambda tokens, end: beginnings[end, tokens[:end].tobytes()]
  spans = [_turns(t.mask) for t in trajectories]
  for end in {end for turns in spans for span in turns for end in span}:
    for g, t in enumerate(trajectories):
      if len(t.tokens) >= end:
        beginnings.setdefault((end, t.tokens[:end].tobytes()), []).append(g)
  for g, t in enumerate(trajectories):
    for begin, end in spans[g]:
      situation = rewards[alike(t.tokens, begin)]
      if not all_equal(situation):
        out[g][begin:end] = (rewards[alike(t.tokens, end)].mean() - situation.mean()) / situation.std()
  return out


def _turns(mask) -> list[tuple[int, int]]:
  """(begin, end) of the runs of ones."""
  edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask) != 0, [0]])))
  return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def split_prompt(trajectories: list[Trajectory]) -> tuple[np.ndarray, list[Trajectory]]:
  """(what all begin with and none is trained on, the rest of each)."""
  end = min(int(np.flatnonzero(np.append(t.mask, 1))[0]) for t in trajectories)
  for t in trajectories[1:]:
    unequal = np.flatnonzero(t.tokens[:end] != trajectories[0].tokens[:end])
    end = int(unequal[0]) if unequal.size else end
  return trajectories[0].tokens[:end], [Trajectory(t.tokens[end:], t.mask[end:]) for t in trajectories]


def encode_messages(tokenizer: Tokenizer, messages, where: str) -> Trajectory:
  """Tokens of a conversation [{role, content}] up to the assistant's last turn, and which of them it said.

  By the tokenizer's chat template: trained is the assistant's content and the token that ends its
  turn. Without a template a message is its content, and a turn ends with the stop token.
  UserError where nothing is said by the assistant, or where the template changes earlier messages.
  """
  said = [i for i, message in enumerate(messages) if message['role'] == 'assistant']
  if not said:
    raise UserError(f'{where}: no message has the role assistant, so there is nothing to train on; add its turns.')
  stop = np.array([tokenizer.stop_token] if tokenizer.stop_token >= 0 else [], np.int32)
  tokens, mask, so_far = [], [], ''
  for turn, i in enumerate(said):
    if tokenizer.chat is None:
      before = ''.join(m['content'] for m in messages[said[turn - 1] + 1 if turn else 0:i])
      ended = 0
    else:
      text = tokenizer.chat(messages[:i])
      if not text.startswith(so_far):
        raise UserError(f'{where}: the chat template changes what stands before message {i} when that is added; '
                        'use one that only adds, or give each turn as a trajectory of its own.')
      before, ended, so_far = text[len(so_far):], min(turn, 1), text + messages[i]['content']
    before, content = tokenizer.encode(before), tokenizer.encode(messages[i]['content'])
    if turn + 1 == len(said) or tokenizer.chat is None:
      content = np.append(content, stop)
    tokens += [before, content]
    mask += [np.arange(before.size) < ended, np.ones(content.size)]
  return Trajectory(np.concatenate(tokens).astype(np.int32), np.concatenate(mask))
