"""Remakes every figure of the README from committed rows; trains nothing. PNG, SVG and a CSV of what is drawn.

    bash launch.sh figures
    bash launch.sh figures --out=DIR --only=convergence_recall,drift

A figure whose rows are not there is left out, with a line that says so. About 20 seconds.
"""
import csv
import dataclasses
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
import numpy as np

from branchreplay import config
from experiments import common, plots, work

LONGSTRAW = {'updates': (1, 2, 4, 8), 'loss': (0.0012, 0.0004, 0.228, 0.093), 'logprob': (0.014, 0.025, 3.1, 3.8)}  # at 1M positions


@dataclasses.dataclass(frozen=True)
class Settings:
  rows: str = str(common.ROOT / 'experiments/results')  # folder of the JSONL files
  out: str = str(common.ROOT / 'experiments/results/figures')  # folder to write to
  only: tuple[str, ...] = ()  # figures to make; none: all


def define(flags):
  common.define_flags(flags, Settings())


# ---- tables: rows -> list of dicts, what a figure draws and its CSV holds


def curve_table(rows, by: str) -> list[dict]:
  """Mean, least and greatest held-out reward over seeds, by arm and update."""
  found = {}
  for r in rows:
    if r.get('kind') == 'curve':
      found.setdefault((r[by], r['step']), {})[r['seed']] = r  # a row written again counts once
  table = []
  for (arm, step), seeds in found.items():
    rewards = [r['reward'] for r in seeds.values()]
    table.append({'arm': arm, 'step': step, 'seeds': len(rewards), 'reward': np.mean(rewards), 'least': min(rewards),
                  'greatest': max(rewards), 'seconds': np.mean([r['seconds'] for r in seeds.values()])})
  return table


def quality_table(rows) -> list[dict]:
  """Held-out reward by arm, length over the trained one and part of the document, mean over seeds."""
  found = {}
  for r in rows:
    if r.get('kind') == 'quality':
      found.setdefault((r['arm'], r['times']), {})[r['seed']] = r['by_depth']
  table = []
  for (arm, times), seeds in found.items():
    for part, values in enumerate(zip(*seeds.values())):
      values = [v for v in values if v is not None]  # None: no document asked about this part
      table.append({'arm': arm, 'times': times, 'part': part, 'seeds': len(values),
                    'reward': float(np.mean(values)) if values else None})
  return table


def quickstart_table(rows) -> list[dict]:
  positions = full = 0
  table = []
  for r in rows:
    if r['stage'] == 'rl':
      positions, full = positions + r['positions'], full + r['positions_full_sequences']
    if r['stage'] in ('rl', 'eval'):
      table.append({'stage': r['stage'], 'step': r['step'], 'reward': r['reward'], 'positions': positions,
                    'positions_full_sequences': full})
  return table


def fidelity_table(rows) -> list[dict]:
  return [{k: r[k] for k in ('stage', 'mode', 'prompt_len', 'rel_l2', 'cosine')} for r in rows]


def fidelity_kinds_table(rows) -> list[dict]:
  """By layer and kind of parameter, detached, at the longest prompt of each stage."""
  table = []
  for r in rows:
    longest = max(x['prompt_len'] for x in rows if x['stage'] == r['stage'])
    if r['mode'] == 'detached' and r['prompt_len'] == longest:
      table += [{'stage': r['stage'], 'prompt_len': longest, 'by': by, 'name': name, **d}
                for by in ('by_layer', 'by_kind') for name, d in r[by].items()]
  return table


def drift_table(rows) -> list[dict]:
  """Medians and means over anchors, by learning rate, length and age of the state."""
  found = {}
  for r in rows:
    found.setdefault((r['prompt_len'], r['learning_rate'], r['updates']), []).append(r)
  return [{'prompt_len': p, 'learning_rate': rate, 'updates': age, 'anchors': len(group),
           **{f'{name}_{f.__name__}': f([r[name] for r in group]) for name in ('logprob', 'loss') for f in (np.mean, np.median)}}
          for (p, rate, age), group in sorted(found.items())]


def work_table(rows) -> list[dict]:
  return [{k: r[k] for k in ('model', 'branches', 'branch_len', 'prefix_len', 'positions_ratio', 'flops_ratio',
                             'flops_ratio_detached')} for r in rows]


def speed_table(rows) -> list[dict]:
  """Seconds of an update, and full sequences over exact: as measured, and by FLOPs as work.py counts them."""
  table = []
  for r in rows:
    sizes = [r[k] for k in ('prefix_len', 'branches', 'branch_len')]
    full, exact = (work.update_work(config.preset(r['model']), *sizes, mode)['flops'] for mode in ('full-sequence', 'exact'))
    table.append({k: r[k] for k in ('model', 'branches', 'branch_len', 'prefix_len', 'exact_s', 'detached_s', 'full_sequence_s')}
                 | {'measured_ratio': r['full_sequence_s'] / r['exact_s'], 'flops_ratio': full / exact})
  return table


def compare_table(rows) -> list[dict]:
  """Seconds and MiB of an update of each system on each case; the last row where a case was run twice."""
  last = {}
  for r in rows:
    case = r['case'] + ('_hybrid' if 'deltanet' in r['model_type'] else '')
    last[case, r['peer']] = {'case': case} | {k: r[k] for k in (
        'prefix_len', 'branches', 'branch_len', 'peer', 'seconds', 'over_ours', 'update_mib', 'rel_l2')}
  return list(last.values())


def roofline_table(rows) -> list[dict]:
  """Seconds of an exact update over prefix length, and what c + a P + b P^2 makes of them (least squares of relative errors)."""
  rows = [r for r in rows if not r['repeats']]  # the preset's own number of layers
  longest = max(r['capacity'] for r in rows)  # of one run: what is cleared for a capture is the same
  rows = sorted((r for r in rows if r['capacity'] == longest), key=lambda r: r['prefix_len'])
  p, seconds = (np.array([r[k] for r in rows], float) for k in ('prefix_len', 'seconds'))
  powers = np.stack([p**0, p, p**2], 1)
  fitted = powers @ np.linalg.lstsq(powers / seconds[:, None], np.ones(len(p)), rcond=None)[0]
  phases = ('capture', 'replay', 'pull')
  return [{'model': r['model'], 'prefix_len': r['prefix_len'], 'seconds': r['seconds'], 'fitted': fit}
          | {f'{phase}_{what}': r[f'{phase}_{what}'] for what in ('s', 'share') for phase in phases} for r, fit in zip(rows, fitted)]


# ---- drawing: (figure, table)


def draw_curves(figure, table):
  axes = figure.subplots()
  for arm in dict.fromkeys(r['arm'] for r in table):
    own = sorted((r for r in table if r['arm'] == arm), key=lambda r: r['step'])
    steps = [r['step'] for r in own]
    line, = axes.plot(steps, [r['reward'] for r in own], 'o-', ms=3, label=f'{arm} ({own[-1]["seeds"]} seeds)')
    axes.fill_between(steps, [r['least'] for r in own], [r['greatest'] for r in own], alpha=0.2, color=line.get_color())
  axes.set(xlabel='update', ylabel='held-out reward: mean and range', ylim=(0, 1.02))
  axes.legend(fontsize=8)


def draw_quality(figure, table):
  arms = list(dict.fromkeys(r['arm'] for r in table))
  times = sorted({r['times'] for r in table})
  parts = 1 + max(r['part'] for r in table)
  for axes, arm in zip(figure.subplots(1, len(arms), sharey=True, squeeze=False)[0], arms):
    image = np.full((len(times), parts), np.nan)
    for r in table:
      if r['arm'] == arm:
        image[times.index(r['times']), r['part']] = np.nan if r['reward'] is None else r['reward']
    axes.imshow(image, vmin=0, vmax=1, cmap='viridis', aspect='auto')
    for (i, j), value in np.ndenumerate(image):
      axes.text(j, i, f'{value:.2f}', ha='center', va='center', color='w' if value < 0.6 else 'k', fontsize=7)
    axes.set(title=arm, xlabel='fifth of the document', xticks=range(parts), xticklabels=range(1, parts + 1),
             yticks=range(len(times)), yticklabels=[f'{t}x' for t in times])


def draw_quickstart(figure, table):
  left, right = figure.subplots(1, 2)
  for stage, style, label in (('rl', '-', 'sampled in training'), ('eval', 'o-', 'held-out prompts')):
    own = [r for r in table if r['stage'] == stage]
    left.plot([r['step'] for r in own], [r['reward'] for r in own], style, label=label, color='0.75' if stage == 'rl' else None)
  left.set(xlabel='update', ylabel='reward', ylim=(0, 1.02))
  own = [r for r in table if r['stage'] == 'rl']
  for name, label in (('positions', 'branch replay'), ('positions_full_sequences', 'full sequences')):
    right.plot([r['step'] for r in own], [r[name] / 1e6 for r in own], label=label)
  right.set(xlabel='update', ylabel='positions processed (millions)')
  left.legend(), right.legend()


def draw_fidelity(figure, table):
  stages = list(dict.fromkeys(r['stage'] for r in table))
  for axes, stage in zip(figure.subplots(1, len(stages), sharey=True, squeeze=False)[0], stages):
    for mode in dict.fromkeys(r['mode'] for r in table):
      own = sorted((r for r in table if r['stage'] == stage and r['mode'] == mode), key=lambda r: r['prompt_len'])
      axes.plot([r['prompt_len'] for r in own], [r['rel_l2'] for r in own], 'o-', label=mode)
    axes.set(title=stage, xscale='log', xlabel='prompt, tokens', ylim=(0, None))
  figure.axes[0].set_ylabel('relative L2 to the exact gradient')
  figure.axes[0].legend(fontsize=8)


def draw_kinds(figure, table):
  names = list(dict.fromkeys(r['name'] for r in table))
  axes, stages = figure.subplots(), list(dict.fromkeys(r['stage'] for r in table))
  for i, stage in enumerate(stages):
    value = {r['name']: r['rel_l2'] for r in table if r['stage'] == stage}
    axes.barh(np.arange(len(names)) + 0.25 * i, [value.get(n) or 0 for n in names], 0.25, label=stage)
  axes.set(yticks=np.arange(len(names)) + 0.25, yticklabels=names, xlabel='detached: relative L2 to the exact gradient')
  axes.tick_params('y', labelsize=6)
  axes.legend()


def draw_drift(figure, table):
  for axes, name, label in zip(figure.subplots(1, 2), ('logprob', 'loss'), ('log-prob, mean absolute difference (nats)',
                                                                           'loss, relative difference')):
    for key in dict.fromkeys((r['prompt_len'], r['learning_rate']) for r in table):
      own = [r for r in table if (r['prompt_len'], r['learning_rate']) == key]
      axes.plot([r['updates'] for r in own], [r[f'{name}_mean'] for r in own], 'o-',
                label=f'{key[0]:,} positions, rate {key[1]:g}')
    axes.plot(LONGSTRAW['updates'], LONGSTRAW[name], 'k^--', label='LongStraw, 1M positions (as published)')
    axes.set(xlabel='updates since the capture', ylabel=label, xscale='log', yscale='log')
    axes.set_xticks(LONGSTRAW['updates'], LONGSTRAW['updates'])
    axes.minorticks_off()
  figure.axes[0].legend(fontsize=8)


def draw_work(figure, table):
  for axes, name, title in zip(figure.subplots(1, 2, sharey=True), ('flops_ratio', 'flops_ratio_detached'), ('exact', 'detached')):
    for branches in dict.fromkeys(r['branches'] for r in table):
      own = [r for r in table if r['branches'] == branches]
      axes.plot([r['prefix_len'] / r['branch_len'] for r in own], [r[name] for r in own], 'o-', label=f'G = {branches}')
    axes.axhspan(8, 16, color='0.9')
    axes.set(title=f'{title}, {table[0]["model"]}', xscale='log', yscale='log', xlabel='P / R')
  figure.axes[0].set_ylabel('FLOPs, full sequences over branch replay')
  figure.axes[0].legend(fontsize=8)


def draw_speed(figure, table):
  left, right = figure.subplots(1, 2, sharey=False)
  names, at = [f'P={r["prefix_len"]:,}\nR={r["branch_len"]}\nG={r["branches"]}' for r in table], np.arange(len(table))
  for i, name in enumerate(('full_sequence_s', 'exact_s', 'detached_s')):
    left.bar(at + 0.27 * i, [r[name] for r in table], 0.27, label=name[:-2].replace('_', ' '))
  left.set(xticks=at + 0.27, xticklabels=names, yscale='log', ylabel='seconds an update')
  for i, (name, label) in enumerate((('measured_ratio', 'measured'), ('flops_ratio', 'by FLOPs'))):
    right.bar(at + 0.4 * i, [r[name] for r in table], 0.4, label=label)
  right.set(xticks=at + 0.2, xticklabels=names, ylabel='full sequences over exact')
  left.legend(), right.legend()


def draw_compare(figure, table):
  left, right = figure.subplots(1, 2)
  cases, peers = (list(dict.fromkeys(r[k] for r in table)) for k in ('case', 'peer'))
  for axes, value, label in ((left, 'over_ours', 'seconds an update, over ours in the same rounds'), (right, 'update_mib', 'MiB an update adds at its peak')):
    for i, peer in enumerate(peers):
      own = [r for r in table if r['peer'] == peer]
      axes.bar([cases.index(r['case']) + i * 0.8 / len(peers) for r in own], [r[value] for r in own], 0.8 / len(peers), label=peer)
    axes.set(xticks=np.arange(len(cases)) + 0.3, yscale='log', ylabel=label)
    axes.set_xticklabels([c.replace('_', '\n') for c in cases], fontsize=7)
  left.legend(fontsize=7)


def draw_roofline(figure, table):
  left, right = figure.subplots(1, 2)
  p = [r['prefix_len'] for r in table]
  left.plot(p, [r['seconds'] for r in table], 'o', label='measured')
  left.plot(p, [r['fitted'] for r in table], '-', label='c + a P + b P²')
  left.set(xscale='log', yscale='log', xlabel='prefix positions P', ylabel='seconds of an exact update')
  for phase in ('capture', 'replay', 'pull'):
    right.plot(p, [r[f'{phase}_share'] for r in table], 'o-', label=phase)
  right.set(xscale='log', xlabel='prefix positions P', ylabel="share of the machine's matrix-multiply rate",
            ylim=(0, None))  # a rate that wanders can put a share of one round above 1
  left.legend(), right.legend()


def of_task(table, task):
  return lambda rows: table([r for r in rows if r['task'] == task])


FIGURES = {  # name: (file of rows, table, drawing, size in inches)
    'quickstart': ('quickstart_metrics', quickstart_table, draw_quickstart, (10, 4)),
    **{f'convergence_{t}': ('convergence', of_task(lambda rows: curve_table(rows, 'arm'), t), draw_curves, (6, 4))
       for t in ('recall', 'needle')},
    **{f'quality_{t}': ('convergence', of_task(quality_table, t), draw_quality, (11, 3)) for t in ('recall', 'needle')},
    'fidelity': ('fidelity', fidelity_table, draw_fidelity, (10, 4)),
    'fidelity_kinds': ('fidelity', fidelity_kinds_table, draw_kinds, (7, 8)),
    'drift': ('drift', drift_table, draw_drift, (10, 4)),
    'work': ('work', work_table, draw_work, (9, 4)),
    'speed': ('speed', speed_table, draw_speed, (10, 4)),
    'compare': ('compare', compare_table, draw_compare, (12, 4)),
    'roofline': ('roofline', roofline_table, draw_roofline, (10, 4)),
    'objectives': ('objectives', lambda rows: curve_table(rows, 'objective'), draw_curves, (6, 4)),
    'block_diffusion': ('block_diffusion', lambda rows: curve_table(rows, 'arm'), draw_curves, (6, 4)),
}


def write_csv(path: Path, table: list[dict]) -> None:
  """The table with floats to six digits, the same bytes everywhere."""
  text = lambda v: f'{v:.6g}' if isinstance(v, float) else v
  with path.open('w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, list(table[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows({k: text(v) for k, v in row.items()} for row in table)


def main(flags):
  settings, made = common.from_flags(flags, Settings()), []
  common.check_known('figure', settings.only, FIGURES)
  out = common.make_folder(settings.out)
  for name in settings.only or FIGURES:
    file, tabulate, draw, size = FIGURES[name]
    path = Path(settings.rows) / f'{file}.jsonl'
    table = tabulate(plots.read_rows(path)) if path.is_file() else []
    if not table:
      common.log(f'{name}: no rows of it in {path}; left out.')
      continue
    with rc_context({'svg.hashsalt': name}):
      figure = Figure(figsize=size, layout='constrained')
      draw(figure, table)
      figure.savefig(out / f'{name}.png', dpi=110)
      figure.savefig(out / f'{name}.svg', metadata={'Date': None})
    write_csv(out / f'{name}.csv', table)
    made.append(name)
  common.emit({'figures': made, 'folder': settings.out})


if __name__ == '__main__':
  common.run(define, main)
