"""What bfloat16 costs the gradient: parameters and state, sums of dK/dV, kept recurrent states, a row each.

    bash launch.sh precision --prefix_len=8192 --seeds=0,1,2,3,4,5,6,7 --variants=bfloat16,full_sequence
    bash launch.sh precision --model=tiny-mixed --prefix_len=32768,131072 --variants=cotangent

Each variant's gradient is measured against the float32 one of the same parameters (rounded to bfloat16 first), so that
what is left is the arithmetic: relative L2 and cosine. Variants: `bfloat16`, parameters and state, with sums and
recurrent states in float32, as a run of --dtype=bfloat16; `full_sequence`, plain autodiff on full sequences in bfloat16;
`cotangent` and `history`, float32 but for --cotangent_dtype or --history_dtype=bfloat16; `bfloat16_cotangent`, both.
Random weights and tokens. Without --every_rounding XLA leaves out roundings to bfloat16 where it fuses operations, most in full
sequences, whose layers are not cut up by collectives. Sums of dK/dV over segments need attention below the last layer, as
tiny-dense and tiny-mixed have: to the last layer's keys the branches alone send cotangents, in tiny-hybrid one for each
replay. Full sequences' memory and time grow with the whole. Expected: bfloat16 1.6 to 2.3% by the seed at 8,192, full sequences
1.6 to 2.2%, in one of eight seeds 5.3%; dK/dV in bfloat16 0.6% for tiny-dense at 32,768 and segments of 256
(8 minutes; 131,072 takes sixteen times as long), 0.01% for tiny-mixed at either length.
"""
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import config, gradients, mesh, model, objectives
from branchreplay.checks import check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common, gradient_parity, problems

VARIANTS = {  # name -> dtype of the parameters, what changes in ReplayConfig
    'bfloat16': ('bfloat16', {}), 'full_sequence': ('bfloat16', {}), 'cotangent': ('float32', {'cotangent_dtype': 'bfloat16'}),
    'history': ('float32', {'history_dtype': 'bfloat16'}), 'bfloat16_cotangent': ('bfloat16', {'cotangent_dtype': 'bfloat16'})}


@dataclasses.dataclass(frozen=True)
class Precision:
  model: str = 'tiny-hybrid'  # preset, see config.py
  prefix_len: tuple[str, ...] = ('32768', '131072')  # tokens of the prompt
  branches: int = 4  # responses of the prompt
  branch_len: int = 64  # tokens of a response
  segment_len: int = 256  # positions of a prefix segment
  devices: int = 2  # devices of the seq axis
  every_rounding: bool = False  # XLA leaves no rounding to bfloat16 out, as it may where it fuses
  variants: tuple[str, ...] = ('bfloat16', 'cotangent', 'history', 'bfloat16_cotangent')  # these, or full_sequence
  seeds: tuple[str, ...] = ('0',)  # of parameters and tokens
  out: str = ''  # JSONL file to append the rows to


def define(flags):
  common.define_flags(flags, Precision())
  flags.set_default('virtual_devices', Precision().devices)


def main(flags):
  settings = common.from_flags(flags, Precision())
  lengths, seeds = common.whole_numbers('prefix_len', settings.prefix_len, 1), common.whole_numbers('seeds', settings.seeds, 0)
  common.check_known('variant', settings.variants, VARIANTS)
  if flags.dtype != 'float32':
    raise UserError('precision compares dtypes itself; leave --dtype out.')
  shape = config.preset(settings.model)
  replay = ReplayConfig(segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=max(lengths),
                        branch_capacity=settings.branch_len, replay_batch=settings.branches)
  check_replay(replay, settings.devices, settings.branches)
  mesh_ = mesh.make_mesh(1, settings.devices)
  objective = objectives.make_objective('grpo', ObjectiveConfig())
  group_of = lambda length, seed: problems.random_group(shape, replay, length, settings.branches, settings.branch_len,
                                                        np.dtype('float32'), seed, kl=False)

  def gradient_of(dtype, changes, full_sequence=False):
    function = gradients.gradient_function(mesh_, shape, dataclasses.replace(replay, **changes), objective, group_of(1, 0), full_sequence)
    made = function.lower(model.shapes(shape, dtype), group_of(1, 0)).compile({'xla_allow_excess_precision': not settings.every_rounding})
    place = lambda *arguments: jax.device_put(arguments, made.input_shardings[0])
    return lambda params, group: jax.device_get(made(*place(jax.tree.map(lambda x: x.astype(dtype), params), group)).grads)

  truth = gradient_of('float32', {})
  found = {name: gradient_of(*VARIANTS[name], full_sequence=name == 'full_sequence') for name in settings.variants}
  for length, seed in itertools.product(lengths, seeds):
    params, group = model.init(shape, jax.random.key(seed), jnp.bfloat16), group_of(length, seed)
    want = truth(params, group)
    for name, gradient in found.items():
      row = common.provenance() | dataclasses.asdict(settings) | {
          'prefix_len': length, 'seed': seed, 'segments': -(-length // settings.segment_len), 'variant': name} | gradient_parity.compare(gradient(params, group), want)
      common.log(f'{length:>8,} positions, seed {seed}, {name}: {row["rel_l2"]:.2e}')
      if settings.out:
        common.append_row(settings.out, row)
      common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
