"""Writes a run's last checkpoint as a Hugging Face folder: config.json, safetensors, tokenizer files.

    bash launch.sh export --workdir=runs/train --folder=exported

Any serving stack reads the folder; a second export has the same bytes. The model must have
an architecture of Hugging Face's: Qwen3, Qwen3.5, Llama or Mistral shapes, as a run with
--init=FOLDER has. A critic's value head stays behind.
"""
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from branchreplay import checkpoint, config, hf, lora, mesh, model
from branchreplay.config import UserError
from experiments import adapters, common


@dataclasses.dataclass(frozen=True)
class Export:
  workdir: str = 'runs/train'  # of the run
  folder: str = ''  # to write; no other weights may be in it
  export_dtype: str = ''  # float32 | bfloat16 | float16; '': as trained
  shard_gb: float = 5.0  # weights above it are split into files of about that size


def define(flags):
  common.define_flags(flags, Export())


def read_run(workdir: Path) -> dict:
  """The configuration of the run in `workdir`; UserError where there is none."""
  file = workdir / 'config.json'
  try:
    held = json.loads(file.read_text(encoding='utf-8'))
    fields = {f.name for f in dataclasses.fields(config.ModelConfig)}
    shape = {k: tuple(v) if isinstance(v, list) else v for k, v in held['model'].items() if k in fields}
    return {'model': config.ModelConfig(**shape), 'dtype': held['dtype'], 'init': held['train'].get('init', '')}
  except OSError as error:
    raise UserError(f'{file} cannot be read ({error.strerror}); name the --workdir of a run.')
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f'{file} is no configuration of a run ({error!r}); name the --workdir of a run.')


def main(flags):
  settings = common.from_flags(flags, Export())
  if not settings.folder:
    raise UserError('say where to with --folder=FOLDER.')
  if settings.export_dtype not in ('', 'float32', 'bfloat16', 'float16'):
    raise UserError(f'unknown export_dtype {settings.export_dtype!r}; use float32, bfloat16 or float16.')
  if settings.shard_gb <= 0:
    raise UserError(f'shard_gb={settings.shard_gb}; it must be positive.')
  workdir = Path(settings.workdir)
  run = read_run(workdir)
  if run['dtype'] == 'float64':
    jax.config.update('jax_enable_x64', True)
  one = mesh.make_mesh(1, 1)
  sharding = jax.sharding.NamedSharding(one, jax.sharding.PartitionSpec())
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                        lora.trainable(run['model'], model.shapes(run['model'], run['dtype'])))
  with checkpoint.open_checkpoints(workdir) as manager:
    found = checkpoint.restore_part(manager, 'params', target, common.log)
  if found is None:
    raise UserError(f'{workdir} holds no checkpoint yet; wait for the first one or name another --workdir.')
  step, params, meta = found
  if run['model'].lora_rank:
    base = hf.load(run['init'], run['model'], one, config.ReplayConfig(), run['dtype'])
    params = adapters.rejoined(run['model'], params, meta, base, run['init'])
  if settings.export_dtype:
    params = jax.tree.map(lambda x: x.astype(jnp.dtype(settings.export_dtype)), params)
  hf.save(settings.folder, params, run['model'], source=run['init'] or None,
          shard_bytes=int(settings.shard_gb * 1e9))
  common.log(f'Wrote the parameters after update {step} to {settings.folder}.')
  common.emit(common.provenance() | {'workdir': settings.workdir, 'folder': settings.folder, 'step': step,
                                     'parameters': sum(x.size for x in jax.tree.leaves(params))})


if __name__ == '__main__':
  common.run(define, main)
