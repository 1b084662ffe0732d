"""A tree of trajectories against training on each in full: seconds of an update, and compiled memory.

    bash launch.sh tree_speed --out=experiments/results/tree_speed.jsonl

Two sets of 16 trajectories of 3,328 positions. In one, a prompt of 2,048 is followed by 4 turns of 1,024,
each of which by 4 of 256: 5.2 times as many positions as distinct ones. In the other nothing is shared.
All tokens behind the prompt are trained, inner turns with the weight of all their leaves. Rounds are
interleaved in one process and medians reported; compilation is excluded and stated. Memory: the
compiler's report of the first tree's function at 4, 16 and 64 trajectories. About 10 minutes on 2 cores,
which should be idle. Expected: at least 4 times faster with the overlap, at most 1.1 times slower without.
"""
import dataclasses
import time

import jax
import numpy as np

from branchreplay import batch, config, gradients, mesh, model, objectives, tree, trie
from branchreplay.checks import check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common


@dataclasses.dataclass(frozen=True)
class TreeSpeed:
  model: str = 'tiny-dense'  # preset, see config.py
  prompt_len: int = 2048  # tokens of the prompt
  turn_lens: tuple[str, ...] = ('1024', '256')  # tokens of each turn
  fan_outs: tuple[str, ...] = ('4', '4')  # continuations at each turn
  leaves: tuple[str, ...] = ('4', '16', '64')  # numbers of trajectories whose memory is compiled; the last fan-out changes
  segment_len: int = 256  # positions of a segment
  row_block: int = 256  # query rows per block of the attention loops
  key_block: int = 64  # keys per block of the attention loops; larger ones reach past the end of short paths
  devices: int = 8  # devices of the seq axis
  rounds: int = 3  # interleaved rounds; medians are reported
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, TreeSpeed())


def responses_of(turns, fan_outs, vocab: int, rng) -> list[np.ndarray]:
  """All paths below a prompt: at depth i fan_outs[i] continuations of turns[i] random tokens."""
  if not turns:
    return [np.zeros(0, np.int32)]
  heads = [rng.integers(0, vocab, turns[0]) for _ in range(fan_outs[0])]
  return [np.concatenate([h, below]) for h in heads for below in responses_of(turns[1:], fan_outs[1:], vocab, rng)]


def trajectories(settings: TreeSpeed, turns, fan_outs, vocab: int, shared: bool, rng):
  """(prompt, responses) of the tree, or as many trajectories of the same length that share nothing."""
  responses = responses_of(turns, fan_outs, vocab, rng)
  if shared:
    return rng.integers(0, vocab, settings.prompt_len), responses
  length = settings.prompt_len + len(responses[0])
  return np.zeros(0, np.int32), [rng.integers(0, vocab, length) for _ in responses]


def replay_of(settings: TreeSpeed, longest: int, first: int) -> ReplayConfig:
  """Sizes for trajectories of `longest` positions, the first `first` of them a prompt; whole segments for each turn."""
  whole = lambda n: -(-n // settings.segment_len) * settings.segment_len
  return ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.segment_len,
      prefix_capacity=whole(longest) + 3 * settings.segment_len, branch_capacity=whole(max(longest - first, 1)),
      row_block=settings.row_block, key_block=settings.key_block)


def problem(shape, replay, prompt, responses, rng):
  """A stacked tree, and a stacked group of the same trajectories."""
  others = dict(advantages=rng.normal(size=len(responses)), dtype=np.float32)
  made = trie.make_tree(shape, replay, prompt, responses, **others)
  group = batch.make_group(shape, replay, prompt, responses, **others)
  return jax.tree.map(lambda x: np.asarray(x)[None], (made, group))


def compiled(function, params, arguments):
  """(compiled function, its arguments on the devices, seconds that compiling took)."""
  started = time.perf_counter()
  made = function.lower(params, arguments).compile()
  return made, jax.device_put((params, arguments), made.input_shardings[0]), time.perf_counter() - started


def time_pair(settings: TreeSpeed, mesh_, shape, params, objective, turns, fan_outs, shared: bool) -> dict:
  """Seconds of an update as a tree and on full sequences, interleaved."""
  rng = np.random.default_rng(0)
  prompt, responses = trajectories(settings, turns, fan_outs, shape.vocab_size, shared, rng)
  longest = prompt.size + len(responses[0])
  replay = replay_of(settings, longest, prompt.size)
  made, group = problem(shape, replay, prompt, responses, rng)
  plain = dataclasses.replace(replay, prefix_capacity=max(prompt.size - 1, 1))  # full sequences without padding
  flat = batch.stack([batch.make_group(shape, plain, prompt, responses, advantages=group.advantages[0])])
  functions = {
      'tree': compiled(tree.tree_function(mesh_, shape, replay, objective, made), params, made),
      'full_sequences': compiled(gradients.gradient_function(mesh_, shape, plain, objective, flat, True), params, flat)}
  seconds, grads = {name: [] for name in functions}, {}
  for round_ in range(settings.rounds + 1):
    for name, (function, arguments, _) in functions.items():
      started = time.perf_counter()
      grads[name] = jax.block_until_ready(function(*arguments)).grads
      if round_:  # the first warms up
        seconds[name].append(time.perf_counter() - started)
        common.log(f'round {round_}/{settings.rounds}: {name} {seconds[name][-1]:.2f} s')
  a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]).astype(float) for g in grads.values())
  median = {name: float(np.median(s)) for name, s in seconds.items()}
  return {'shared': shared, 'trajectories': len(responses), 'trajectory_len': longest,
          'distinct_positions': int(made.length.sum()), 'overlap': len(responses) * longest / float(made.length.sum()),
          'tree_s': median['tree'], 'full_sequences_s': median['full_sequences'], 'all_s': seconds,
          'compile_s': {name: f[2] for name, f in functions.items()}, 'rel_l2': float(np.linalg.norm(a - b) / np.linalg.norm(b)),
          'full_sequences_over_tree': median['full_sequences'] / median['tree']}


def memory_of(settings: TreeSpeed, mesh_, shape, objective, dtype, turns, fan_outs, leaves: int) -> int:
  """Bytes per device of the tree's function with so many trajectories, by the compiler's report."""
  rng = np.random.default_rng(0)
  above = int(np.prod(fan_outs[:-1]))
  if leaves % above:
    raise UserError(f'--leaves={leaves} is no multiple of the {above} inner turns; change it or --fan_outs.')
  prompt, responses = trajectories(settings, turns, (*fan_outs[:-1], leaves // above), shape.vocab_size, True, rng)
  replay = replay_of(settings, prompt.size + len(responses[0]), prompt.size)
  made, _ = problem(shape, replay, prompt, responses, rng)
  report = tree.tree_function(mesh_, shape, replay, objective, made).lower(
      model.shapes(shape, dtype), made).compile().memory_analysis()
  return common.program_bytes(report)


def main(flags):
  settings = common.from_flags(flags, TreeSpeed())
  turns, fan_outs, leaves = (common.whole_numbers(name, getattr(settings, name), 1) for name in ('turn_lens', 'fan_outs', 'leaves'))
  if len(turns) != len(fan_outs) or settings.rounds < 1 or settings.prompt_len < 1:
    raise UserError('give as many --turn_lens as --fan_outs, and --rounds and --prompt_len of at least 1.')
  shape, mesh_ = config.preset(settings.model), mesh.make_mesh(1, settings.devices)
  check_replay(replay_of(settings, settings.prompt_len, 0), settings.devices, 1)
  objective = objectives.make_objective('grpo', ObjectiveConfig())
  params = model.init(shape, jax.random.key(0), flags.dtype)
  memory = {n: memory_of(settings, mesh_, shape, objective, flags.dtype, turns, fan_outs, n) for n in leaves}
  common.log(f'bytes per device by trajectories: {memory}')
  for shared in (True, False):
    row = common.provenance() | dataclasses.asdict(settings) | {'seed': 0, 'dtype': flags.dtype, 'total_bytes': memory}
    row |= time_pair(settings, mesh_, shape, params, objective, turns, fan_outs, shared)
    if settings.out:
      common.append_row(settings.out, row)
    common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
