"""Figures from rows; nothing here trains."""
import json
from pathlib import Path


def read_rows(path) -> list[dict]:
  """The rows of a JSONL file."""
  return [json.loads(line) for line in Path(path).read_text().splitlines()]


def training(path, rows: list[dict], branches: int) -> Path:
  """Reward over updates, and positions processed beside full sequences; writes a PNG."""
  from matplotlib.figure import Figure  # slow to import, and needed at the end only
  updates = [r for r in rows if r['stage'] == 'rl']
  held_out = [r for r in rows if r['stage'] == 'eval']
  figure = Figure(figsize=(10, 4), layout='constrained')
  left, right = figure.subplots(1, 2)
  left.plot([r['step'] for r in updates], [r['reward'] for r in updates], color='0.75', label='sampled in training')
  left.plot([r['step'] for r in held_out], [r['reward'] for r in held_out], 'o-', label='held-out prompts')
  left.set(xlabel='update', ylabel='reward', ylim=(0, 1.02))
  left.legend()
  for name, label in (('positions', 'branch replay'), ('positions_full_sequences', f'full sequences, {branches} branches')):
    total, points = 0, []
    for r in updates:
      total += r[name]
      points.append(total / 1e6)
    right.plot([r['step'] for r in updates], points, label=label)
  right.set(xlabel='update', ylabel='positions processed (millions)')
  right.legend()
  figure.savefig(path, dpi=120)
  return Path(path)


def curves(path, rows: list[dict], by: str) -> Path:
  """Held-out reward over updates, a line for each value of `by`: mean and range over seeds; writes a PNG."""
  from matplotlib.figure import Figure
  figure = Figure(figsize=(6, 4), layout='constrained')
  axes = figure.subplots()
  for name in dict.fromkeys(r[by] for r in rows):
    found = {}
    for r in rows:
      if r[by] == name and r['kind'] == 'curve':
        found.setdefault(r['step'], {})[r['seed']] = r['reward']  # a row written again counts once
    steps = sorted(found)
    values = [list(found[s].values()) for s in steps]
    line, = axes.plot(steps, [sum(v) / len(v) for v in values], 'o-', label=f'{name} ({len(values[0])} seeds)')
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.2, color=line.get_color())
  axes.set(xlabel='update', ylabel='held-out reward', ylim=(0, 1.02))
  axes.legend()
  figure.savefig(path, dpi=120)
  return Path(path)
