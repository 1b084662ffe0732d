"""Branches decoded from the captured state, all branches of a group together.

A decoded token is a segment of one valid position, run by the same `extend` as
everything else: the prefix's keys are read once for the whole group. Each device
carries one slot a token and branch, of which one in `seq` is filled.
Letters: N prompts, G branches, R branch capacity, V vocabulary.
"""
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from branchreplay import mesh
from branchreplay import model as layers
from branchreplay import state as states
from branchreplay.model import Params
from branchreplay.prefix import STACKED_CAPTURED, Captured, advance, capture
from branchreplay.replay import extend
from branchreplay.segment import Segment
from branchreplay.state import State


@struct.dataclass
class Prompts:
  """N prompts to sample from; see `batch.make_prefix`."""
  prefix: Any  # i32 [N, n, T]
  prefix_length: Any  # i32 [N]
  last: Any  # i32 [N], the last prompt token, the branches' first input


@struct.dataclass
class Forks:
  """C nodes that continue each of N captured prefixes, to fork branches from."""
  tokens: Any  # i32 [N, C, m, T], inputs: the prompt's last token and all of the node's but the last
  length: Any  # i32 [N, C]
  start: Any  # i32 [N], length of the captured prefix
  last: Any  # i32 [N, C], the node's last token


@struct.dataclass
class Rollout:
  """Sampled branches, [N] in front; what stands behind a branch's end is 0."""
  tokens: Any  # i32 [G, R], the stop token included
  length: Any  # i32 [G]
  logprobs: Any  # [G, R] nats, of the model itself (temperature 1, nothing cut off)
  stopped: Any  # bool [G], whether the stop token came before the limit


@struct.dataclass
class Sampling:
  """How a token is drawn; traced, so that a change does not recompile."""
  temperature: Any  # 0: the most likely token
  top_p: Any  # smallest set of most likely tokens whose mass reaches it; 1: all
  stop_token: Any  # i32; -1: none


def draw(key, logits, sampling: Sampling):
  """One token [G] from logits [G, V]."""
  cold = sampling.temperature <= 0
  scaled = logits / jnp.where(cold, 1, sampling.temperature)
  ordered = jnp.sort(jax.nn.softmax(scaled), -1)[:, ::-1]
  mass_before = jnp.cumsum(ordered, -1) - ordered
  least = jnp.where(mass_before < sampling.top_p, ordered, jnp.inf).min(-1, keepdims=True)
  kept = jnp.where(jax.nn.softmax(scaled) >= least, scaled, -jnp.inf)
  sampled = jax.random.categorical(key, kept)
  return jnp.where(cold, logits.argmax(-1), sampled).astype(jnp.int32)


def sample_branches(model, replay, params: Params, split: Params, captured: Captured, prefix_length, last,
                    key, branches: int, max_new_tokens: int, sampling: Sampling) -> Rollout:
  """Decodes `branches` responses of one prompt from its captured state."""
  dtype, t = params.embed.dtype, 1  # one position a device, of which device 0's is valid
  slots = states.empty_slots(model, states.slot_count(replay, branches * max_new_tokens), dtype)
  spread = lambda x: jnp.broadcast_to(x, (x.shape[0], branches, *x.shape[2:]))
  node = State(slots, jax.tree.map(spread, captured.state.recurrent))
  width = replay.branch_segments * replay.branch_segment_len
  zeros = jnp.zeros((branches, width), jnp.int32)
  start = (jnp.int32(0), node, jnp.full((branches,), last, jnp.int32), jnp.ones((branches,), bool),
           Rollout(zeros, zeros[:, 0], zeros.astype(jnp.float32), jnp.zeros((branches,), bool)))

  def going(carry):
    i, _, _, active, _ = carry
    return (i < max_new_tokens) & active.any()

  def step(carry):
    i, node, token, active, out = carry
    inputs = jnp.broadcast_to(token[:, None], (branches, t))
    segment = Segment(inputs, active.astype(jnp.int32), jnp.int32(prefix_length + i))
    node, h, _ = extend(model, replay, params, split, captured.state.slots, node, segment)
    logits = layers.next_logits(model, params, split, h)
    token = draw(jax.random.fold_in(key, i), logits, sampling)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
    put = lambda m, x: m.at[:, i].set(jnp.where(active, x, 0).astype(m.dtype))
    stop = active & (token == sampling.stop_token)
    out = Rollout(put(out.tokens, token), out.length + active, put(out.logprobs, logprob), out.stopped | stop)
    return i + 1, node, token, active & ~stop, out

  return lax.while_loop(going, step, start)[-1]


def rollout_function(mesh_, model, replay, branches: int, max_new_tokens: int, keep_captured: bool):
  """Jitted (params, prompts, keys [N], sampling) -> (Rollout, captured or None), N over `data`.

  With `keep_captured` the captures come out too, for the update to use.
  """
  seq = mesh_.shape[mesh.SEQ]
  shapes = layers.shapes(model)
  split = mesh.split_tree(shapes, seq, replay.shard_params)
  specs = mesh.parameter_specs(shapes, seq, replay.shard_params)

  def local(params, prompts, keys, sampling):
    def step(_, xs):
      prompt, key = xs
      captured = capture(model, replay, params, split, prompt.prefix, prompt.prefix_length)
      rollout = sample_branches(model, replay, params, split, captured, prompt.prefix_length, prompt.last,
                                key, branches, max_new_tokens, sampling)
      return None, (rollout, captured if keep_captured else None)
    return lax.scan(step, None, (prompts, keys))[1]

  prompt_spec = Prompts(P(mesh.DATA, None, mesh.SEQ), P(mesh.DATA), P(mesh.DATA))
  return mesh.sharded(mesh_, local, (specs, prompt_spec, P(mesh.DATA), P()),
                      (P(mesh.DATA), STACKED_CAPTURED if keep_captured else None))


def fork_function(mesh_, model, replay, branches: int, max_new_tokens: int):
  """Jitted (params, captured, forks, keys [N, C], sampling) -> Rollout [N, C, branches, ...], N over `data`.

  Branches decoded from the state of each fork, which is the captured one and the node's own tokens.
  """
  shapes, seq = layers.shapes(model), mesh_.shape[mesh.SEQ]
  split = mesh.split_tree(shapes, seq, replay.shard_params)

  def local(params, captured, forks, keys, sampling):
    def prompt(_, xs):
      captured, forks, keys = xs
      def fork(_, xs):
        tokens, length, last, key = xs
        state = advance(model, replay, params, split, captured.state, tokens, length, forks.start)
        return None, sample_branches(model, replay, params, split, captured.replace(state=state), forks.start + length,
                                     last, key, branches, max_new_tokens, sampling)
      return None, lax.scan(fork, None, (forks.tokens, forks.length, forks.last, keys))[1]
    return lax.scan(prompt, None, (captured, forks, keys))[1]

  spec = Forks(P(mesh.DATA, None, None, mesh.SEQ), P(mesh.DATA), P(mesh.DATA), P(mesh.DATA))
  return mesh.sharded(mesh_, local, (mesh.parameter_specs(shapes, seq, replay.shard_params), STACKED_CAPTURED, spec,
                                     P(mesh.DATA), P()), P(mesh.DATA))
