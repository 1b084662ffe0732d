"""Groups as padded arrays: one prompt and its branches.

Inputs are shifted once, here: a branch's inputs are the last prompt token and all
its tokens but the last, its targets are its tokens. So the state covers the
prompt without its last token, and no logits cross a segment boundary.
Letters: N groups, n prefix segments, T segment_len, G branches, R branch_capacity.
"""
from typing import Any

from flax import struct
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from branchreplay import mesh
from branchreplay.config import ModelConfig, ReplayConfig, UserError


@struct.dataclass
class Group:
  """One group, or N stacked in front. Matrices [G, R] are zero behind a branch's end."""
  prefix: Any  # i32 [n, T], the prompt without its last token
  prefix_length: Any  # i32 []
  inputs: Any  # i32 [G, R]
  targets: Any  # i32 [G, R]
  length: Any  # i32 [G], tokens of each branch
  mask: Any  # [G, R], weight of a token in the objective, 1 or 0
  advantages: Any  # [G], or [G, R] where each token has its own
  old_logprobs: Any = None  # [G, R]; None: the policy's own, so that every ratio is 1
  ref_logprobs: Any = None  # [G, R]; None where there is no KL term
  sampler_logprobs: Any = None  # [G, R] as the sampler computed them; None: no correction
  returns: Any = None  # [G, R], what ppo's critic learns; None: no critic
  old_values: Any = None  # [G, R], the critic's before the update; None: no value clipping
  denominator: Any = None  # [], what a token mean divides by; None: the group's own tokens


@struct.dataclass
class Scores:
  """What the model says of a group's tokens, or the objective's cotangents of it."""
  logprob: Any  # [G, R] nats
  entropy: Any  # [G, R] nats, of the distribution the token was drawn from
  value: Any = None  # [G, R] the critic's estimate of the return; None: no critic


def group_spec(group: Group) -> Group:
  """PartitionSpecs of stacked groups: N over `data`, segment positions over `seq`."""
  specs = jax.tree.map(lambda _: P(mesh.DATA), group)
  return specs.replace(prefix=P(mesh.DATA, None, mesh.SEQ))


def check_tokens(model: ModelConfig, tokens, what: str) -> None:
  """Raises UserError for an id outside the vocabulary: indexing would clamp it."""
  tokens = np.asarray(tokens)
  if tokens.size and (tokens.min() < 0 or tokens.max() >= model.vocab_size):
    raise UserError(f'{what} holds token id {tokens.max() if tokens.max() >= model.vocab_size else tokens.min()}, '
                    f'outside the vocabulary of {model.vocab_size}; use the tokenizer of this model.')


def make_prefix(replay: ReplayConfig, prompt) -> tuple[np.ndarray, np.int32]:
  """prefix [n, T] and its length; UserError where it exceeds the capacity."""
  state = np.asarray(prompt, np.int32)[:-1]
  capacity = replay.prefix_segments * replay.segment_len
  if state.size > capacity:
    raise UserError(f'the prompt has {state.size + 1} tokens, the capacity is {capacity + 1}; '
                    f'raise --prefix_capacity to {state.size} or shorten the prompt.')
  padded = np.zeros(capacity, np.int32)
  padded[:state.size] = state
  return padded.reshape(replay.prefix_segments, replay.segment_len), np.int32(state.size)


def make_group(model: ModelConfig, replay: ReplayConfig, prompt, responses, *, masks=None,
               advantages=None, old_logprobs=None, ref_logprobs=None, sampler_logprobs=None, dtype=np.float32) -> Group:
  """One group of numpy arrays.

  Args:
    prompt: token ids [P]. Where it is empty, each response's first token is given
      instead of scored: column j of every matrix then belongs to token j + 1.
    responses: a list of token id arrays, of any lengths up to branch_capacity.
    masks, old_logprobs, ref_logprobs, sampler_logprobs: lists of arrays like `responses`, or None
      (masks: all ones).
    advantages: [G], or a list like `responses` where each token has its own; None: zeros.

  Raises UserError for no branches, lengths over the capacity, ids outside the vocabulary.
  """
  if not len(responses):
    raise UserError('a group needs at least one branch; raise --branches to 1 or more.')
  prompt = np.asarray(prompt, np.int32)
  responses = [np.asarray(r, np.int32) for r in responses]
  check_tokens(model, prompt, 'the prompt')
  check_tokens(model, np.concatenate(responses), 'a response')
  first = 1 if prompt.size == 0 else 0
  capacity = replay.branch_segments * replay.branch_segment_len
  longest = max(r.size for r in responses) - first
  if longest > capacity:
    raise UserError(f'a branch has {longest} tokens, the capacity is {capacity}; '
                    f'raise --branch_capacity to {longest}.')

  def matrix(rows, kind):
    out = np.zeros((len(responses), capacity), kind)
    for i, row in enumerate(rows):
      row = np.asarray(row)[first:]
      out[i, :row.size] = row
    return out

  prefix, prefix_length = make_prefix(replay, prompt)
  before = [np.concatenate([prompt[-1:], r[:-1]]) if r.size else r for r in responses]
  if first:  # inputs are the responses themselves, all but their last token
    before = [np.concatenate([[0], r[:-1]]) if r.size else r for r in responses]
  optional = lambda rows: None if rows is None else matrix(rows, dtype)
  if advantages is None:
    advantages = np.zeros(len(responses))
  advantages = matrix(advantages, dtype) if any(np.ndim(a) for a in advantages) else np.asarray(advantages, dtype)
  return Group(
      prefix=prefix, prefix_length=prefix_length, inputs=matrix(before, np.int32),
      targets=matrix(responses, np.int32),
      length=np.array([max(r.size - first, 0) for r in responses], np.int32),
      mask=matrix([np.ones(r.size) for r in responses] if masks is None else masks, dtype),
      advantages=advantages,
      old_logprobs=optional(old_logprobs), ref_logprobs=optional(ref_logprobs),
      sampler_logprobs=optional(sampler_logprobs))


def make_masked_group(model: ModelConfig, replay: ReplayConfig, prompt, inputs, targets, masks, dtype=np.float32,
                      **others) -> Group:
  """One group whose branches are denoised, not continued (block diffusion): no shift.

  The state covers all of the prompt; position j of a branch holds inputs[j] and predicts
  targets[j]. With replay.block_len tokens of a block see each other in attention.

  Args:
    prompt: token ids [P]. inputs, targets, masks: lists of arrays of equal lengths; the
      mask is 1 where the objective counts a token (where it was masked out of the input).
    others: see `make_group`.
  """
  group = make_group(model, replay, np.append(prompt, 0), targets, masks=masks, dtype=dtype, **others)
  rows = np.zeros_like(group.inputs)
  for i, (row, target) in enumerate(zip(inputs, targets)):
    row = np.asarray(row, np.int32)
    check_tokens(model, row, 'an input')
    if len(row) != len(target):
      raise UserError(f'branch {i} has {len(row)} inputs and {len(target)} targets; give as many of both.')
    rows[i, :row.size] = row
  return group.replace(inputs=rows)


def stack(groups: list[Group]) -> Group:
  """Stacks groups of one shape in front: N groups."""
  return jax.tree.map(lambda *x: np.stack(x), *groups)
