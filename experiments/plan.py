"""What a run needs before it is started: bytes per device by part, the longest prefix that fits, FLOPs and time.

    bash launch.sh plan --model=qwen3.5-27b --device=v5p --devices=8 --prefix_len=2097152 --branches=8
    bash launch.sh plan --model=qwen3.5-27b --device=h20-96 --devices=8 --prefix_len=2097152 --lora_rank=16
    bash launch.sh plan --model=bench --device=cpu --devices=2 --prefix_len=32768 --calibrate=experiments/results/roofline.jsonl

Nothing is compiled or run: seconds. --model is a preset, or a folder with a config.json of Hugging Face. What is held
between steps (parameters, state, cotangent, gradients) is counted from the very shapes of stream.py; what lives within a
step is an estimate (`working_bytes`). Time is FLOPs over the devices' peak times --efficiency, or over the rates of a
measured row of roofline.py (--calibrate). The same for a full-sequence trainer with checkpointed layers is beside it.
"""
import dataclasses
import json

import jax
from jax.sharding import AbstractMesh
import numpy as np

from branchreplay import config, mesh, model, objectives, prefix, stream
from branchreplay.branches import most_segments
from branchreplay.config import ModelConfig, ObjectiveConfig, ReplayConfig, UserError
from branchreplay.gradients import kept_of_branches
from branchreplay.lora import trainable
from experiments import common, fit, roofline, work

# Kind -> memory of a device in bytes, as its driver or compiler reports it, and its dense bfloat16 FLOP/s by its maker's sheet.
DEVICES = {'h20-96': (102.6e9, 148e12), 'h20-141': (150.7e9, 148e12), 'h100': (85.5e9, 989e12), 'h200': (150.7e9, 989e12),
           'b200': (192.2e9, 2250e12), 'a100-80': (85.9e9, 312e12), 'v5p': (102.8e9, 459e12), 'v5e': (17.2e9, 197e12),
           'cpu': (12e9, 1e11)}


@dataclasses.dataclass(frozen=True)
class Plan:
  model: str = 'qwen3.5-27b'  # preset, or a folder with a config.json
  repeats: int = 0  # of the model's layer pattern, if more than 0
  device: str = 'v5p'  # h20-96 | h20-141 | h100 | h200 | b200 | a100-80 | v5p | v5e | cpu
  devices: int = 8  # of the seq axis
  device_gb: float = 0.0  # memory of a device, 1e9 bytes; 0: the kind's
  prefix_len: int = 2097152  # positions of the prompt
  branches: int = 8  # responses
  branch_len: int = 1024  # tokens of a response
  segment_len: int = 8192  # positions of a prefix segment
  replay_batch: int = 1  # branches replayed at once
  key_block: int = 1024  # keys per block of the attention loops
  row_block: int = 2048  # query rows per block of the attention loops
  vocab_rows: int = 1024  # positions whose logits exist at once
  mode: str = 'exact'  # exact | detached | depth=K
  keep: str = 'state'  # state | attention | layers | auto: what the way back need not compute again; auto: the most that fits
  accumulate_dtype: str = 'float32'  # sums of gradients, and of dK/dV
  cotangent_dtype: str = ''  # of dK/dV, if not accumulate_dtype
  history_dtype: str = ''  # of the recurrent states kept for the pull, if not float32
  offload: bool = False  # keep dK/dV and the recurrent states kept for the pull in the host's memory
  shard_params: bool = True  # split parameters and gradients over the devices
  lora_rank: int = 0  # of adapters beside frozen matrices; 0: all is trained
  optimizer: bool = False  # count Adam's moments in float32 as resident
  efficiency: float = 0.4  # share of the devices' peak
  calibrate: str = ''  # JSONL file of roofline.py: the last row of this model gives the rates instead
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, Plan())
  flags.set_default('dtype', 'bfloat16')


def _bytes(tree, kind: str = 'device') -> int:
  """Bytes a device of sharded ShapeDtypeStructs in its own or in the host's memory."""
  held = [x for x in jax.tree.leaves(tree) if (x.sharding.memory_kind == 'pinned_host') == (kind == 'host')]
  return sum(int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize for x in held)


def held_bytes(shape: ModelConfig, replay: ReplayConfig, devices: int, branches: int, branch_len: int, dtype: str) -> dict:
  """Part -> bytes per device of what is held between the steps of an update; `host` is in the host's memory."""
  mesh_ = AbstractMesh((1, devices), (mesh.DATA, mesh.SEQ))
  group, params = fit.abstract_group(shape, replay, branches, branch_len), model.shapes(shape, dtype)
  steps = stream.make_steps(mesh_, shape, replay, objectives.make_objective('grpo', ObjectiveConfig()), group)
  shapes = stream.held_shapes(mesh_, replay, steps, params, group)
  captured, pulling = shapes['captured'], shapes['pulling']
  moments = mesh.abstract(mesh_, steps.specs['params'], trainable(shape, params))
  return {'params': _bytes(shapes['params']), 'state': _bytes(captured.state), 'history': _bytes(captured.history),
          'kept': _bytes(captured.kept), 'cotangent': _bytes(pulling.cotangent), 'gradients': _bytes(pulling.grads),
          'adam': sum(2 * 4 * _bytes(x) // x.dtype.itemsize for x in jax.tree.leaves(moments)),
          'host': _bytes((captured, pulling), 'host')}


def working_bytes(shape: ModelConfig, replay: ReplayConfig, devices: int, dtype: str) -> dict:
  """Phase -> bytes per device of what lives within a step: an estimate, of the largest layer's arrays.

  T positions of a segment, of which a device has t; rows of all devices meet in attention. Counted in arrays that
  are alive together at the worst point of a layer: forward 1 set, backward with its recomputation about 2, of the delta
  rule 3 1/2; how many is by the compiler's reports (tests/test_plan.py).
  """
  m, size, f32 = shape, np.dtype(jax.numpy.dtype(dtype)).itemsize, 4
  attention = m.repeats * m.attention_per_repeat
  layer = max(sum(x.size for x in jax.tree.leaves(block)) // m.repeats for block in model.shapes(m).blocks)
  weights = 2 * layer * size if replay.shard_params and devices > 1 else 0  # gathered, and what is trained of it in flight

  kept = prefix.kept_of_position(shape, dtype)
  keep = kept_of_branches(replay.keep)
  own = lambda total: 2 * attention * m.kv_heads * (total // devices) * m.head_dim * size  # a node's keys and values

  def step(total, backward, keep='layers'):
    t, rows = total // devices, total * m.heads * m.head_dim
    values = -(-m.delta_value_heads // devices)
    # The delta rule's keys, values and matrices over a chunk, as deltanet.py names them.
    delta = total * values * (6 * m.delta_key_dim + 4 * m.delta_value_dim + 6 * m.chunk) * f32 if m.deltanet_per_repeat else 0
    states = -(-total // m.chunk) * values * m.delta_key_dim * m.delta_value_dim * f32 if m.deltanet_per_repeat else 0
    attended = rows * (size + f32) if attention else 0  # queries, and what comes of them in float32
    hidden = t * (m.width + m.mlp_width) * size
    if not backward:
      return t * kept[replay.kept] + max(attended + hidden, delta + hidden, 3 * hidden)
    return t * kept[keep] + max(3 * attended + 2 * hidden, 7 * delta // 2 + 2 * states + 2 * hidden, 5 * hidden)

  logits = min(replay.vocab_rows, replay.branch_segment_len * replay.replay_batch) * m.vocab_size * f32
  branch = replay.branch_segment_len * replay.replay_batch
  one_layer = 2 * replay.prefix_segments * replay.segment_len // devices * m.kv_heads * m.head_dim * f32 if replay.offload else 0
  stored = branch // devices * (most_segments(m, replay) - 1) * kept['products'] if replay.keep == 'layers' else 0
  return {'capture': weights + step(replay.segment_len, False) + own(replay.segment_len),
          'replay': 2 * weights + step(branch, True, keep) + 2 * own(branch) + stored + 2 * logits // (devices if replay.shard_params else 1) + one_layer,
          'pull': 2 * weights + step(replay.segment_len, True) + one_layer}


def phase_bytes(shape, replay, devices: int, branches: int, branch_len: int, dtype: str) -> tuple[dict, dict]:
  """Part -> bytes held, and phase -> bytes per device while it runs."""
  held, working = held_bytes(shape, replay, devices, branches, branch_len, dtype), working_bytes(shape, replay, devices, dtype)
  captured = held['params'] + held['state'] + held['history'] + held['kept']
  both = captured + held['cotangent'] + held['gradients']
  phases = {'capture': captured + working['capture'], 'replay': both + working['replay'], 'pull': both + working['pull']}
  return held, {k: v for k, v in phases.items() if k != 'pull' or replay.pull_depth}


def longest_prefix(settings: Plan, dtype: str, room: float) -> int:
  """The longest prefix, in whole segments, whose worst phase needs at most `room` bytes a device; 0: none does."""
  def need(segments):
    one = dataclasses.replace(settings, prefix_len=int(segments) * settings.segment_len)
    shape, replay = fit.configurations(one, one.devices)
    held, phases = phase_bytes(shape, replay, one.devices, one.branches, one.branch_len, dtype)
    return max(phases.values()) + (held['adam'] if settings.optimizer else 0)
  first, second = need(1), need(1025)  # what is held grows by the same for each segment
  if first > room:
    return 0
  return (1 + int((room - first) / ((second - first) / 1024))) * settings.segment_len


def rates_of(settings: Plan, peak: float) -> dict:
  """Phase -> FLOP/s of all devices together."""
  if not settings.calibrate:
    return dict.fromkeys(('capture', 'replay', 'pull'), settings.devices * peak * settings.efficiency)
  try:
    with open(settings.calibrate, encoding='utf-8') as file:
      rows = [row for row in map(json.loads, file) if row.get('model') == settings.model and 'pull_flops' in row]
  except (OSError, ValueError) as error:
    raise UserError(f'cannot read rows from {settings.calibrate!r} ({error}); name a file that roofline.py wrote.')
  if not rows:
    raise UserError(f'no row of {settings.model!r} in {settings.calibrate!r}; run roofline.py with --model={settings.model} first.')
  return {phase: rows[-1][f'{phase}_flops'] / rows[-1][f'{phase}_s'] for phase in ('capture', 'replay', 'pull')}


def full_sequence(shape: ModelConfig, settings: Plan, held: dict, rates: dict, dtype: str) -> dict:
  """Bytes per device, FLOPs and seconds of training on full sequences with checkpointed layers, a branch at a time."""
  length, size = settings.prefix_len + settings.branch_len, np.dtype(jax.numpy.dtype(dtype)).itemsize
  t = length // settings.devices
  inputs = shape.layers * t * shape.width * size
  layer = t * (3 * shape.mlp_width + 4 * shape.heads * shape.head_dim + 2 * shape.width) * size
  flops = work.update_work(shape, settings.prefix_len, settings.branches, settings.branch_len, 'full-sequence')['flops']
  return {'full_sequence_bytes': held['params'] + held['gradients'] + inputs + layer + (held['adam'] if settings.optimizer else 0),
          'full_sequence_flops': flops, 'full_sequence_s': flops / rates['pull']}


def plan(settings: Plan, dtype: str) -> dict:
  """The row; see the module."""
  common.check_known('device', [settings.device], DEVICES)
  if min(settings.prefix_len, settings.branch_len, settings.devices) < 1 or not 0 < settings.efficiency <= 1:
    raise UserError('prefix_len, branch_len and devices must be at least 1, efficiency above 0 and at most 1.')
  memory_, peak = DEVICES[settings.device]
  room, rates = settings.device_gb * 1e9 or memory_, rates_of(settings, peak)
  for keep in reversed(config.KEEPS) if settings.keep == 'auto' else (settings.keep,):
    chosen = dataclasses.replace(settings, keep=keep)
    shape, replay = fit.configurations(chosen, chosen.devices)
    held, phases = phase_bytes(shape, replay, chosen.devices, chosen.branches, chosen.branch_len, dtype)
    total = max(phases.values()) + (held['adam'] if chosen.optimizer else 0)
    if total <= room:
      break
  flops = roofline.phase_flops(shape, keep, chosen.prefix_len, chosen.branches, chosen.branch_len)
  flops['pull'] *= min(1, replay.pull_depth / replay.prefix_segments)
  seconds = {phase: flops[phase] / rates[phase] for phase in flops}
  return dataclasses.asdict(chosen) | {'dtype': dtype} | {f'{k}_bytes': v for k, v in held.items()} | {
      f'{k}_phase_bytes': v for k, v in phases.items()} | {
          'total_bytes': total, 'room_bytes': room, 'fits': total <= room, 'longest_prefix': longest_prefix(chosen, dtype, room),
          'positions': chosen.prefix_len + chosen.branches * chosen.branch_len,
          'positions_full_sequence': chosen.branches * (chosen.prefix_len + chosen.branch_len)} | {
              f'{k}_flops': v for k, v in flops.items()} | {f'{k}_s': v for k, v in seconds.items()} | {
                  'seconds': sum(seconds.values())} | full_sequence(shape, chosen, held, rates, dtype)


def table(row: dict) -> str:
  """The row as people read it."""
  gb = lambda name: f'{row[name] / 1e9:10.2f} GB'
  lines = [f'{row["model"]}, {row["prefix_len"]:,} positions, {row["branches"]} branches of {row["branch_len"]:,}, '
           f'{row["devices"]} x {row["device"]}, keep={row["keep"]}']
  lines += [f'  {part:<12}{gb(f"{part}_bytes")}' for part in ('params', 'state', 'history', 'kept', 'cotangent', 'gradients')]
  lines += [f'  {"adam":<12}{gb("adam_bytes")}' + ('' if row['optimizer'] else '  (not counted)')]
  lines += [f'  {"in the host":<12}{gb("host_bytes")}'] if row['offload'] else []
  for phase in ('capture', 'replay', 'pull'):
    if f'{phase}_phase_bytes' in row:
      lines.append(f'{phase:<14}{gb(f"{phase}_phase_bytes")} a device {row[f"{phase}_flops"]:10.2e} FLOPs {row[f"{phase}_s"]:10.1f} s')
  lines.append(f'{"largest":<14}{gb("total_bytes")} of {row["room_bytes"] / 1e9:.1f}: {"fits" if row["fits"] else "DOES NOT FIT"}; '
               f'longest prefix that fits: {row["longest_prefix"]:,}')
  lines.append(f'full sequences{gb("full_sequence_bytes")} a device {row["full_sequence_flops"]:10.2e} FLOPs '
               f'{row["full_sequence_s"]:10.1f} s, {row["full_sequence_s"] / row["seconds"]:.1f} times ours')
  return '\n'.join(lines)


def main(flags):
  settings = common.from_flags(flags, Plan())
  row = common.provenance() | plan(settings, flags.dtype)
  common.log(table(row))
  if settings.out:
    common.append_row(settings.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
