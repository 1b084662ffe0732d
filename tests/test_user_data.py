"""A run on a user's own files: checkpoint folder, tokenizer, JSONL prompts and reward, then export."""
import json
from pathlib import Path
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from branchreplay import checkpoint as checkpoints, hf, mesh, model
from branchreplay.config import ModelConfig, ReplayConfig
from experiments import common, export, train, train_dpo, train_tree

SHAPE = ModelConfig(vocab_size=320, width=16, mlp_width=24, repeats=1, heads=4, kv_heads=2, head_dim=8,
                    tied_embeddings=True)
TINY = ['--prompt_len=24', '--prompts=2', '--branches=4', '--data=1', '--seq=2', '--segment_len=16', '--dtype=float32',
        '--eval_prompts=2', '--eval_samples=2', '--checkpoint_every=2', '--max_new_tokens=5', '--learning_rate=0.02']


@pytest.fixture
def checkpoint(tokenizer_folder):
  hf.save(tokenizer_folder, model.init(SHAPE, jax.random.key(0), np.float32), SHAPE)
  return tokenizer_folder


@pytest.fixture
def files(checkpoint, monkeypatch):
  """Flags that name a checkpoint, a JSONL file of texts and chats, and a reward of the user's own."""
  folder = checkpoint / 'mine'
  folder.mkdir()
  monkeypatch.chdir(folder)
  records = [{'prompt': f'the fact is {i}', 'answer': str(i)} for i in range(8)]
  records.append({'prompt': [{'role': 'user', 'content': 'what is the fact? ' * 9}], 'answer': 'three'})
  (folder / 'prompts.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  (folder / 'own_reward.py').write_text(
      'def short(prompt, response, answer):\n  assert prompt and answer\n  return float(len(response) < 4)\n'
      'def nothing(prompt, response, answer):\n  return float("nan")\n')
  return [f'--init={checkpoint}', '--data_file=prompts.jsonl', '--long_prompts=truncate', '--reward=own_reward:short']


def run(*flags):
  common.run(train.define, train.main, ['train', *TINY, *flags])


def test_a_run_on_own_files_resumed_half_way_and_exported(files, checkpoint, capsys):
  run(*files, '--workdir=halves', '--steps=2')
  run(*files, '--workdir=halves', '--steps=4')
  assert 'going on after update 2' in capsys.readouterr().err
  for name in ('halves', 'again'):
    common.run(export.define, export.main, ['export', '--workdir=halves', f'--folder={name}-out'])
  assert open('halves-out/model.safetensors', 'rb').read() == open('again-out/model.safetensors', 'rb').read()
  trained, before = load_file('halves-out/model.safetensors'), load_file(checkpoint / 'model.safetensors')
  assert trained.keys() == before.keys() and any(np.any(trained[k] != before[k]) for k in before)
  assert open('halves-out/tokenizer.json').read() == (checkpoint / 'tokenizer.json').read_text()
  again = hf.load('halves-out', hf.read_config('halves-out'), mesh.make_mesh(1, 1), ReplayConfig())
  assert hf.read_config('halves-out') == SHAPE and again.embed.shape == (320, 16)
  rows = [json.loads(line) for line in open('halves/metrics.jsonl')]
  assert sum(r['cut_prompts'] for r in rows if r['stage'] == 'rl') > 0  # the long chat, in 8 prompts of 8


@pytest.mark.parametrize('flags, sentence', [
    (['--reward=own_reward:nothing'], r'prompts.jsonl, line \d+: the reward of the response .* is nan'),
    (['--long_prompts=refuse'], r'prompts.jsonl, line 9: the prompt has \d+ tokens, the capacity is 24'),
    (['--data_file=absent.jsonl'], 'absent.jsonl cannot be read'), (['--init=absent'], 'absent'),
    (['--tokenizer=absent'], 'absent has no tokenizer.json')])
def test_mistakes_end_in_one_sentence(files, capsys, flags, sentence):
  with pytest.raises(SystemExit) as stop:
    run(*files, '--workdir=run', '--steps=4', *flags)
  error = capsys.readouterr().err
  assert stop.value.code == 2 and 'Traceback' not in error
  assert re.search(sentence, error)


def test_nothing_to_export(files, capsys):
  for flags, sentence in ((['--folder=out'], 'cannot be read'), ([], 'say where to with --folder')):
    with pytest.raises(SystemExit) as stop:
      common.run(export.define, export.main, ['export', '--workdir=absent', *flags])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_preference_pairs(files, capsys):
  records = [{'prompt': f'the fact is {i}', 'chosen': f'three {i}', 'rejected': 'answer'} for i in range(12)]
  open('pairs.jsonl', 'w').write(''.join(json.dumps(r) + '\n' for r in records))
  flags = [*TINY, files[0], '--data_file=pairs.jsonl', '--workdir=pairs', '--branch_capacity=16']
  common.run(train_dpo.define, train_dpo.main, ['train_dpo', *flags, '--steps=4'])
  common.run(train_dpo.define, train_dpo.main, ['train_dpo', *flags, '--steps=10'])
  output = capsys.readouterr()
  assert 'going on after update 4' in output.err
  held_out = json.loads(output.out.splitlines()[-1])['held_out']
  rows = [json.loads(line) for line in open('pairs/metrics.jsonl')]
  assert held_out['accuracy'] == 1 and held_out['margin'] > 1
  np.testing.assert_allclose(rows[1]['loss'], np.log(2), rtol=1e-5)  # the policy is the reference before update 1
  assert [r['step'] for r in rows if r['stage'] == 'rl'] == list(range(1, 11))
  for wrong, sentence in ((['--objective=grpo'], 'an --objective of dpo'),
                          (['--offline', '--eval_file=pairs.jsonl'], 'leave --offline out'),
                          (['--data_file=prompts.jsonl'], 'line 1: "chosen" is missing')):
    with pytest.raises(SystemExit) as stop:
      common.run(train_dpo.define, train_dpo.main, ['train_dpo', *flags, '--steps=10', *wrong])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_ready_made_responses_and_rewards(files, capsys):
  """Offline groups: of three responses the two whose rewards differ most are trained on, and nothing is sampled."""
  records = [{'prompt': f'the fact is {i}', 'responses': ['yes', 'maybe', 'no'], 'rewards': [1, 0.5, 0]} for i in range(8)]
  with open('offline.jsonl', 'w') as file:
    file.write(''.join(json.dumps(r) + '\n' for r in records))
  flags = [f for f in files if 'data_file' not in f] + ['--data_file=offline.jsonl', '--offline', '--eval_file=prompts.jsonl',
                                                         '--workdir=offline', '--steps=6']
  run(*flags, '--branches=2')
  rows = [r for r in map(json.loads, open('offline/metrics.jsonl')) if r['stage'] == 'rl']
  assert all(r['reward'] == 0.5 and r['informative'] == 2 for r in rows) and rows[-1]['positions'] > rows[-1]['positions_sampled']
  with pytest.raises(SystemExit):
    run(*flags, '--branches=4', '--workdir=other')
  assert re.search(r'offline.jsonl, line \d: 3 responses, and --branches=4', capsys.readouterr().err)


def test_trees_of_ready_made_conversations(files, capsys):
  """Conversations of two turns from JSONL: the better ones become likelier; a stopped run is taken up."""
  say = lambda role, content: {'role': role, 'content': content}
  def talk(call, answer):
    return {'messages': [say('user', 'the fact'), say('assistant', call), say('tool', 'three'), say('assistant', answer)],
            'reward': float(call == 'three') + float(answer == 'answer')}
  record = {'trajectories': [talk(c, a) for c in ('three', 'is') for a in ('answer', 'the')]}
  with open('trees.jsonl', 'w') as file:
    file.write((json.dumps(record) + '\n') * 10)
  flags = [files[0], *(f for f in TINY if not f.startswith(('--max_new', '--eval_samples'))), '--data_file=trees.jsonl',
           '--workdir=trees', '--prefix_capacity=96', '--segments=16']
  run = lambda *more: common.run(train_tree.define, train_tree.main, ['train_tree', *flags, *more])
  run('--steps=2')
  run('--steps=4')
  rows = [json.loads(line) for line in open('trees/metrics.jsonl')]
  evals = {r['step']: r['margin'] for r in rows if r['stage'] == 'eval'}
  assert evals[4] > evals[2] > evals[0]
  updates = [r for r in rows if r['stage'] == 'rl']
  assert [r['step'] for r in updates] == [1, 2, 3, 4]
  assert all(r['positions_full_sequences'] > 2 * r['positions'] for r in updates)
  for more, sentence in (('--branches=2', '4 trajectories, and --branches=2; raise it'), ('--objective=ppo', 'trees are trained by'),
                         ('--samples=8', 'leave --full_sequence, --samples'), ('--prefix_capacity=32', 'raise --prefix_capacity to')):
    with pytest.raises(SystemExit, match='2'):
      run('--steps=4', more, f'--workdir={more[2:8]}')
    assert sentence in capsys.readouterr().err


def test_lora_trains_adapters_and_exports_whole_matrices(files, checkpoint, capsys):
  """The reference policy is the model with its adapters off; only adapted matrices differ in the export."""
  run = lambda module, *more: common.run(module.define, module.main, [module.__name__, *more])
  flags = [*files, *TINY, '--lora_rank=2', '--lora_targets=q,down', '--kl_coef=0.1', '--resample=0', '--samples=0', '--workdir=lora']
  run(train, *flags, '--steps=4')
  rows = [json.loads(line) for line in open('lora/metrics.jsonl')]
  kl = [r['kl'] for r in rows if r['stage'] == 'rl']
  assert kl[0] == pytest.approx(0, abs=1e-9) and kl[-1] > 0
  run(export, '--workdir=lora', '--folder=merged')
  before, after = load_file(checkpoint / 'model.safetensors'), load_file('merged/model.safetensors')
  changed = {name for name in before if not np.array_equal(before[name], after[name])}
  assert changed == {f'model.layers.0.{n}.weight' for n in ('self_attn.q_proj', 'mlp.down_proj')} and set(before) == set(after)
  with pytest.raises(SystemExit, match='2'):
    run(train, '--lora_rank=2', '--workdir=other')
  assert 'name its checkpoint folder with --init' in capsys.readouterr().err


def test_lora_checkpoints_hold_adapters_and_go_on_beside_the_same_weights_alone(files, checkpoint, capsys):
  run = lambda module, *more: common.run(module.define, module.main, [module.__name__, *more])
  flags = [*files, *TINY, '--lora_rank=2', '--lora_targets=q', '--resample=0', '--samples=0', '--learning_rate=0.1']
  losses = lambda folder: [json.loads(line)['loss'] for line in open(f'{folder}/metrics.jsonl') if '"rl"' in line]
  run(train, *flags, '--steps=4', '--workdir=straight')
  run(train, *flags, '--steps=2', '--workdir=parts')
  with checkpoints.open_checkpoints(Path('parts')) as manager:
    held = checkpoints._leaves(manager.item_metadata(2).state.tree['params'])
  assert sorted(held) == ['blocks/0/mixer/q/a', 'blocks/0/mixer/q/b']
  run(train, *flags, '--steps=4', '--workdir=parts')
  assert losses('parts') == losses('straight') and len(losses('parts')) == 4
  weights = load_file(checkpoint / 'model.safetensors')
  name = 'model.layers.0.mlp.up_proj.weight'
  save_file(weights | {name: weights[name] + 0.001}, checkpoint / 'model.safetensors')
  for again in (lambda: run(train, *flags, '--steps=6', '--workdir=parts'), lambda: run(export, '--workdir=parts', '--folder=other')):
    with pytest.raises(SystemExit, match='2'):
      again()
    assert 'not those that the adapters of this run were trained with' in capsys.readouterr().err
