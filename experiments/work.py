"""Raw work: positions and FLOPs of one update, full sequences against branch replay, over group size and lengths.

    bash launch.sh work --out=experiments/results/work.jsonl

Counted from shapes, nothing runs: seconds, for any model of config.py. The source's claim is 8 to
16 times less raw work; the table shows where it is reached. Wall-clock beside it is speed.py's.

A position's matrix products count 2 FLOPs a weight. Linear layers: a forward 1, a backward 2, the
rematerialised forward 1 (every variant rematerialises). Attention: 4 H h FLOPs a visible key
forward, 2.5 times that backward. Capture is one more forward of the prompt, the pull replays and
pulls back once; of the prompt the last layer makes its keys and values alone, where it is attention.
"""
import dataclasses

from branchreplay import config
from branchreplay.config import ModelConfig, UserError
from experiments import common


@dataclasses.dataclass(frozen=True)
class Study:
  model: str = 'qwen3.5-27b'  # preset, see config.py
  branches: tuple[str, ...] = ('2', '4', '8', '16', '32')  # group sizes, G
  branch_len: int = 1024  # tokens of a response, R
  ratios: tuple[str, ...] = ('1', '4', '16', '64', '256', '2048')  # prompt over response, P/R
  out: str = ''  # JSONL file to append the rows to


def define(flags):
  common.define_flags(flags, Study())


def linear_flops(model: ModelConfig) -> float:
  """Of one position's forward through all layers, without attention over keys and without the head."""
  m = model
  inner, keys = m.heads * m.head_dim, 2 * m.delta_key_heads * m.delta_key_dim
  values = m.delta_value_heads * m.delta_value_dim
  attention = m.width * (inner * (3 if m.output_gate else 2) + 2 * m.kv_heads * m.head_dim)
  delta = m.width * (keys + 3 * values + 2 * m.delta_value_heads) + (keys + values) * m.conv_width
  # Chunk form, a position and head: scores and system over the chunk, their products, three products with the state.
  rule = m.delta_value_heads * (m.chunk * (2 * m.delta_key_dim + 2 * m.delta_value_dim + m.chunk)
                                + 3 * m.delta_key_dim * m.delta_value_dim)
  mixers = sum(delta + rule if kind == 'deltanet' else attention for kind in m.pattern)
  return 2.0 * m.repeats * (mixers + len(m.pattern) * 3 * m.width * m.mlp_width)


def key_flops(model: ModelConfig, start: int, count: int) -> float:
  """Of attention's forward for `count` positions from `start` on."""
  def keys(kind):
    if kind == 'deltanet':
      return 0.0
    total = count * start + count * (count + 1) / 2
    if kind == 'window':  # position p sees min(p + 1, window)
      first = max(0, min(count, model.window - start))
      total = first * start + first * (first + 1) / 2 + (count - first) * model.window
    return total
  return 4.0 * model.heads * model.head_dim * model.repeats * sum(keys(kind) for kind in model.pattern)


def prefix_flops(model: ModelConfig, count: int) -> tuple[float, float]:
  """Of a prefix's forward, in linear layers and over keys: of a last layer of attention, whose output nobody reads, keys and values alone."""
  linear, keys = linear_flops(model) * count, key_flops(model, 0, count)
  if model.pattern[-1] == 'deltanet':
    return linear, keys
  last = dataclasses.replace(model, pattern=model.pattern[-1:], repeats=1)
  return linear - 2.0 * count * model.width * (model.heads * model.head_dim + 3 * model.mlp_width), keys - key_flops(last, 0, count)


def update_work(model: ModelConfig, prefix: int, branches: int, branch_len: int, mode: str) -> dict:
  """Positions that go through forward and backward, and FLOPs, of one group's update.

  mode: full-sequence | exact | detached. The head counts on response tokens.
  """
  linear, whole = linear_flops(model), prefix + branch_len
  head = 2.0 * model.width * model.vocab_size * branches * branch_len * 4  # forward twice, backward
  if mode == 'full-sequence':
    flops = branches * (4 * linear * whole + (2 + 2.5) * key_flops(model, 0, whole))
    return {'positions': branches * whole, 'flops': flops + head}
  own = branches * (4 * linear * branch_len + (1 + 2.5) * key_flops(model, prefix, branch_len))
  once, keys = prefix_flops(model, prefix)
  forward, pull = once + keys, 4 * once + (1 + 2.5) * keys
  return {'positions': prefix + branches * branch_len,
          'flops': own + forward + head + (pull if mode == 'exact' else 0.0)}


def main(flags):
  settings = common.from_flags(flags, Study())
  model = config.preset(settings.model)
  if settings.branch_len < 1:
    raise UserError(f'branch_len={settings.branch_len}; it must be at least 1.')
  source = common.provenance() | {'model': settings.model, 'branch_len': settings.branch_len}
  common.log(f'{"G":>4} {"P/R":>6} {"P":>10}  positions  FLOPs exact  FLOPs detached   (full sequences over replay)')
  for branches in common.whole_numbers('branches', settings.branches, 1):
    for ratio in common.whole_numbers('ratios', settings.ratios, 1):
      prefix = ratio * settings.branch_len
      full, exact, detached = (update_work(model, prefix, branches, settings.branch_len, mode)
                               for mode in ('full-sequence', 'exact', 'detached'))
      row = source | {'branches': branches, 'prefix_len': prefix, 'positions': exact['positions'],
                      'positions_full_sequence': full['positions'], 'flops': exact['flops'],
                      'flops_detached': detached['flops'], 'flops_full_sequence': full['flops'],
                      'positions_ratio': full['positions'] / exact['positions'],
                      'flops_ratio': full['flops'] / exact['flops'],
                      'flops_ratio_detached': full['flops'] / detached['flops']}
      common.log(f'{branches:>4} {ratio:>6} {prefix:>10,}  {row["positions_ratio"]:>9.2f}  {row["flops_ratio"]:>11.2f}  '
                 f'{row["flops_ratio_detached"]:>14.2f}')
      if settings.out:
        common.append_row(settings.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
