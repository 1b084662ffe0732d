"""Broken input files: each ends in a result or in one clear sentence, never in a traceback.

    bash launch.sh fuzz --seconds=60
    bash launch.sh fuzz --seconds=900 >> experiments/results/fuzz.jsonl

Valid files (config.json, safetensors and their index, JSONL, tokenizer.json, batch.npz, a run's
config.json, what a reward function returns, the flags of train) are broken at random: bytes flipped, cut or doubled,
JSON values replaced. A case that raises anything but UserError is a fault of ours; its bytes are
written to --out and the status is 1. Cases are a function of --seed and their number.
"""
import copy
import dataclasses
import json
import math
from pathlib import Path
import random
import tempfile
import time

from absl import flags as absl_flags
import numpy as np
from safetensors.numpy import save_file

from branchreplay import checkpoint, data, hf, model, rewards, tokenizer, trie, turns
from branchreplay.config import ModelConfig, ObjectiveConfig, ReplayConfig, TrainConfig, UserError
from branchreplay.hf.reading import open_weights
from experiments import common, training

SHAPE = ModelConfig(vocab_size=300, width=8, mlp_width=8, repeats=2, heads=2, kv_heads=1, head_dim=4)
STRANGE = (None, True, False, 0, -1, 1, 2, 3.5, 1e308, 10**400, math.nan, math.inf, '', 'x', '\ud800', [], [[]], {}, {'a': {}}, [None],
           ['full_attention'], 'llama3', 'linear_attention', '../x', '/etc/passwd')


@dataclasses.dataclass(frozen=True)
class Settings:
  seconds: float = 60.0  # of fuzzing
  seed: int = 0  # of the cases
  first: int = 0  # number of the first case
  out: str = 'runs/fuzz'  # folder for what failed


def define(flags):
  common.define_flags(flags, Settings())


def make_files(folder: Path) -> None:
  """A checkpoint folder, JSONL files, a tokenizer and a batch, all valid."""
  import jax
  import tokenizers
  params = model.init(SHAPE, jax.random.key(0))
  hf.save(folder, params, SHAPE)
  tensors = dict(hf.to_hf_tensors(jax.device_get(params), SHAPE))
  names = sorted(tensors)
  (folder / 'sharded').mkdir()
  (folder / 'sharded' / 'config.json').write_bytes((folder / 'config.json').read_bytes())
  parts = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
  for file, held in parts.items():
    save_file({n: np.ascontiguousarray(tensors[n]) for n in held}, folder / 'sharded' / file)
  index = {'metadata': {}, 'weight_map': {n: file for file, held in parts.items() for n in held}}
  (folder / 'sharded' / 'model.safetensors.index.json').write_text(json.dumps(index))
  lines = [{'prompt': f'question {i}', 'answer': '7', 'responses': ['7', '8'], 'rewards': [1, 0], 'chosen': '7', 'rejected': '8'}
           for i in range(3)] + [{'prompt': [{'role': 'user', 'content': 'q'}], 'answer': 'a'}]
  (folder / 'prompts.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  say = lambda role, text: {'role': role, 'content': text}
  nested = {'messages': [say('user', 'q')], 'children': [{'messages': [say('assistant', a)], 'reward': 1} for a in 'ab']}
  (folder / 'trees.jsonl').write_text(json.dumps({'tree': nested}) + '\n' + json.dumps({'trajectories': [
      {'messages': [say('user', 'q'), say('assistant', a), say('tool', 't'), say('assistant', 'a')], 'reward': 0.5} for a in 'ab']}))
  made = tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0, 'b': 1, 'ab': 2}, [('a', 'b')]))
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps(
      {'eos_token': 'ab', 'chat_template': '{% for m in messages %}{{ m.content }}{% endfor %}'}))
  rng = np.random.default_rng(0)
  np.savez(folder / 'batch.npz', prompt=rng.integers(0, 300, 9), responses=rng.integers(0, 300, (2, 4)),
           response_mask=np.ones((2, 4), np.int64), advantages=rng.normal(size=2),
           old_logprobs=rng.normal(size=(2, 4)), ref_logprobs=rng.normal(size=(2, 4)))
  (folder / 'run').mkdir()
  checkpoint.claim_workdir(folder / 'run', {'train': {'steps': 3}, 'model': dataclasses.asdict(SHAPE)})


# ---- readers: what a user's command does with a file


def read_weights(folder: Path) -> None:
  """Opens and reads every tensor, as `hf.load` does before it lays them out."""
  from branchreplay.hf import names
  from branchreplay.hf.reading import _check_names, _read
  with open_weights(folder) as held:
    wanted = names.tensors(SHAPE)
    _check_names(folder, SHAPE, held, wanted)
    for tensor in wanted:
      _read(held, tensor)


def read_jsonl(folder: Path) -> None:
  tokens = tokenizer.BYTES
  for kind in set(data.KINDS) - {'trees'}:
    try:
      held = data.open_jsonl(folder / 'prompts.jsonl', kind)
    except UserError:
      continue
    for i in range(len(held.lines)):
      data.encode_prompt(tokens, data.record(held, i, 0), 100, 'truncate')


def read_trees(folder: Path) -> None:
  """Reads, encodes, merges, as train_tree does before it compiles."""
  held = data.open_jsonl(folder / 'trees.jsonl', 'trees')
  for i in range(len(held.lines)):
    rows = data.trajectories(data.record(held, i, 0))
    encoded = [turns.encode_messages(tokenizer.BYTES, r['messages'], 'here') for r in rows]
    prompt, rest = turns.split_prompt(encoded)
    trie.make_tree(SHAPE, ReplayConfig(prefix_capacity=64, branch_capacity=64, segment_len=8), prompt,
                   [t.tokens for t in rest], advantages=turns.turn_advantages(rest, [r['reward'] for r in rows]))


def read_tokenizer(folder: Path) -> None:
  held = tokenizer.load(folder, 300)
  held.decode(held.encode('abba'))
  if held.chat is not None:
    held.chat([{'role': 'user', 'content': 'ab'}])


def read_batch(folder: Path) -> None:
  hf.batch_sizes(folder)
  hf.read_batch(folder, SHAPE, ReplayConfig(prefix_capacity=64, branch_capacity=64, segment_len=8, branch_segment_len=8))


READERS = {  # file: reader of its folder
    'config.json': hf.read_config, 'model.safetensors': read_weights,
    'sharded/model.safetensors.index.json': lambda f: read_weights(f / 'sharded'),
    'sharded/a.safetensors': lambda f: read_weights(f / 'sharded'), 'prompts.jsonl': read_jsonl, 'trees.jsonl': read_trees,
    'tokenizer.json': read_tokenizer, 'tokenizer_config.json': read_tokenizer, 'batch.npz': read_batch,
    'run/config.json': lambda f: checkpoint.claim_workdir(f / 'run', {'train': {'steps': 3}}),
}


# ---- mutations


def break_bytes(held: bytes, chance: random.Random) -> bytes:
  """Flips, cuts, doubles or inserts somewhere; mostly near the beginning, where headers are."""
  at = min(int(chance.expovariate(1 / 64)), len(held)) if chance.random() < 0.7 else chance.randrange(len(held) + 1)
  kind = chance.randrange(5)
  if kind == 0:
    return held[:at]
  if kind == 1:
    return held[:at] + chance.randbytes(chance.randint(1, 9)) + held[at:]
  if kind == 2:
    return held[:at] + held[at + chance.randint(1, 99):]
  if kind == 3:
    return held + held[:at]
  flipped = bytearray(held)
  for _ in range(chance.randint(1, 4)):
    if flipped:
      flipped[min(at, len(flipped) - 1)] ^= 1 << chance.randrange(8)
      at = chance.randrange(len(flipped))
  return bytes(flipped)


def break_json(value, chance: random.Random):
  """Replaces, removes or adds a value somewhere in a JSON value."""
  value = copy.deepcopy(value)
  spots = []
  def walk(x):
    for key in list(x) if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
      spots.append((x, key))
      walk(x[key])
  walk(value)
  if not spots or chance.random() < 0.05:
    return chance.choice(STRANGE)
  for _ in range(chance.randint(1, 2)):
    holder, key = chance.choice(spots)
    if chance.random() < 0.2 and isinstance(holder, dict):
      holder.pop(key, None)
    elif isinstance(holder, dict) or key < len(holder):
      holder[key] = copy.deepcopy(chance.choice(STRANGE))
  return value


def broken(held: bytes, name: str, chance: random.Random) -> bytes:
  if chance.random() < 0.5 and name.endswith('.json'):
    return json.dumps(break_json(json.loads(held), chance)).encode('utf-8', 'surrogatepass')
  if chance.random() < 0.5 and name.endswith('.jsonl'):
    lines = held.splitlines(True)
    at = chance.randrange(len(lines))
    lines[at] = json.dumps(break_json(json.loads(lines[at]), chance)).encode('utf-8', 'surrogatepass') + b'\n'
    return b''.join(lines)
  return break_bytes(held, chance)


def case(folder: Path, number: int, seed: int) -> tuple[str, bytes, str]:
  """Runs case `number`: (file, its bytes, 'result' | 'refused' | the fault's traceback in a line)."""
  chance = random.Random(f'{seed}/{number}')
  if chance.random() < 0.05:
    value = chance.choice(STRANGE)
    return 'reward', repr(value).encode(), outcome(lambda: rewards.evaluate(lambda *_: value, 'p', 'r', 'a', 'here'))
  if chance.random() < 0.15:
    words = flag_words(chance)
    return 'flags', ' '.join(words).encode(), outcome(lambda: read_flags(words))
  name = chance.choice(list(READERS))
  held = (folder / name).read_bytes()
  try:
    (folder / name).write_bytes(new := broken(held, name, chance))
    return name, new, outcome(lambda: READERS[name](folder))
  finally:
    (folder / name).write_bytes(held)


def read_flags(words: list[str]) -> None:
  """What `train` does with its command line before any work."""
  flags = absl_flags.FlagValues()
  absl_flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16', 'float64'], '', flag_values=flags)
  training.define(flags)
  try:
    flags(['train', '--task=recall', *words])
  except absl_flags.Error as error:
    raise UserError(' '.join(str(error).split()))
  training.make_run(flags)


def flag_words(chance: random.Random) -> list[str]:
  """One or two of train's flags with strange values."""
  names = [f.name for c in (TrainConfig(), training.REPLAY, ObjectiveConfig(), training.Where()) for f in dataclasses.fields(c)
           if f.name not in ('accumulate_dtype', 'block_len')]
  values = ['', '0', '-1', '1', '3', '7', '2.5', 'nan', 'inf', '-inf', '1e308', '99999999999', '9' * 400, 'true', 'x', '../x', 'depth=-1', 'é']
  return [f'--{chance.choice(names)}={chance.choice(values)}' for _ in range(chance.randint(1, 2))]


def outcome(read) -> str:
  try:
    read()
    return 'result'
  except UserError as error:
    text = str(error)
    return 'refused' if text and '\n' not in text.strip() else f'not one sentence: {text!r}'
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:  # the fault that is looked for
    last = error.__traceback__
    while last.tb_next is not None:
      last = last.tb_next
    return f'{type(error).__name__} ({error}) in {Path(last.tb_frame.f_code.co_filename).name}, line {last.tb_lineno}'


def main(flags):
  settings, number, counts, faults = common.from_flags(flags, Settings()), flags.first, {}, []
  with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    make_files(folder)
    ends = time.monotonic() + settings.seconds
    while time.monotonic() < ends:
      name, held, found = case(folder, number, settings.seed)
      kind = found if found in ('result', 'refused') else 'fault'
      counts[name, kind] = counts.get((name, kind), 0) + 1
      if kind == 'fault':
        faults.append({'case': number, 'file': name, 'fault': found})
        where = Path(settings.out) / f'{settings.seed}-{number}-{Path(name).name}'
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(held)
        common.log(f'case {number}, {name}: {found}; its bytes are in {where}')
      number += 1
  common.emit(common.provenance() | {'cases': number - settings.first, 'seed': settings.seed, 'first': settings.first, 'faults': faults,
                                     'outcomes': {f'{name}: {kind}': n for (name, kind), n in sorted(counts.items())}})
  if faults:
    raise SystemExit(1)


if __name__ == '__main__':
  common.run(define, main)
