"""config.json <-> ModelConfig, for the architectures that the model computes exactly."""
import json
from pathlib import Path
from typing import NamedTuple

from branchreplay.checks import check_model
from branchreplay.config import ModelConfig, UserError


class Family(NamedTuple):
  """An architecture of transformers and what it fixes in a ModelConfig."""
  architecture: str
  kinds: tuple[str, ...]  # layer kinds it may have
  fixed: dict  # fields of ModelConfig
  rotary_fraction: float = 1.0  # where config.json does not say


_LLAMA = {'qk_norm': False, 'output_gate': False, 'norm_offset': 0.0}
FAMILIES = {  # by model_type
    'qwen3': Family('Qwen3ForCausalLM', ('full', 'window'), {**_LLAMA, 'qk_norm': True}),
    'qwen3_5_text': Family('Qwen3_5ForCausalLM', ('deltanet', 'full'),
                           {'qk_norm': True, 'output_gate': True, 'norm_offset': 1.0}, 0.25),
    'llama': Family('LlamaForCausalLM', ('full',), _LLAMA),
    'mistral': Family('MistralForCausalLM', ('full', 'window'), _LLAMA),
}
LAYER_TYPES = {'full_attention': 'full', 'sliding_attention': 'window', 'linear_attention': 'deltanet'}
LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')
LARGEST = 10**8  # of a shape in config.json
MOST_LAYERS = 10**4
DELTA = {'delta_key_heads': 'linear_num_key_heads', 'delta_value_heads': 'linear_num_value_heads',
         'delta_key_dim': 'linear_key_head_dim', 'delta_value_dim': 'linear_value_head_dim',
         'conv_width': 'linear_conv_kernel_dim'}


def read_json(file: Path) -> dict:
  """The JSON object in `file`; UserError where there is none."""
  try:
    value = json.loads(file.read_text(encoding='utf-8'))
  except OSError as error:
    raise UserError(f'{file} cannot be read ({error.strerror}); name a checkpoint folder that holds it.')
  except (ValueError, RecursionError) as error:
    raise UserError(f'{file} is no JSON ({error}); download it again.')
  if not isinstance(value, dict):
    raise UserError(f'{file} is no JSON object; download it again.')
  return value


def text_config(config: dict) -> dict:
  """The text part of a multimodal Qwen3.5 config; any other as it is."""
  if config.get('model_type') != 'qwen3_5':
    return config
  text = config['text_config'] if isinstance(config.get('text_config'), dict) else config
  tied = config.get('tie_word_embeddings', text.get('tie_word_embeddings', False))
  return {**text, 'model_type': 'qwen3_5_text', 'tie_word_embeddings': tied}


def read_config(folder) -> ModelConfig:
  """The ModelConfig of a checkpoint folder's config.json.

  The layer pattern is the shortest that repeats. UserError names whatever the
  model would not compute as transformers does.
  """
  file = Path(folder) / 'config.json'
  config = text_config(read_json(file))
  kind = config.get('model_type')
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise UserError(f'{file}: model_type {kind!r} is not supported; use one of {", ".join(FAMILIES)}.')
  _refuse_what_differs(file, config)
  width, heads = _whole(file, config, 'hidden_size'), _whole(file, config, 'num_attention_heads')
  delta = {}
  if 'deltanet' in FAMILIES[kind].kinds:
    delta = {ours: _whole(file, config, theirs) for ours, theirs in DELTA.items()}
  kinds, window = _layers(file, config)
  pattern = shortest_pattern(kinds)
  model = ModelConfig(
      vocab_size=_whole(file, config, 'vocab_size'), width=width,
      mlp_width=_whole(file, config, 'intermediate_size'), pattern=pattern,
      repeats=len(kinds) // len(pattern), heads=heads,
      kv_heads=_whole(file, config, 'num_key_value_heads', heads),
      head_dim=_whole(file, config, 'head_dim', width // heads),
      norm_eps=_number(file, config, 'rms_norm_eps'), **_rope(file, config),
      tied_embeddings=bool(config.get('tie_word_embeddings', False)), **window, **delta,
      **FAMILIES[kind].fixed)
  try:
    check_model(model)
  except UserError as error:
    raise UserError(f'{file}: {error}')
  return model


def shortest_pattern(kinds) -> tuple[str, ...]:
  """The shortest pattern whose repetition is `kinds`."""
  kinds = tuple(kinds)
  return next(kinds[:n] for n in range(1, len(kinds) + 1) if kinds == kinds[:n] * (len(kinds) // n))


def _refuse_what_differs(file, config) -> None:
  allowed = {
      'attention_bias': (False,), 'mlp_bias': (False,), 'attn_output_gate': (True,),
      'attention_dropout': (0,), 'hidden_act': ('silu', 'swish'), 'output_gate_type': ('silu', 'swish'),
      'quantization_config': (), 'mlp_only_layers': ([],)}
  for key, values in allowed.items():
    if config.get(key) is not None and config[key] not in values:
      only = f'only {" or ".join(json.dumps(v) for v in values)} is' if values else 'it is not'
      raise UserError(f'{file}: {key} is {_short(config[key])}, but {only} supported; '
                      'use a checkpoint without it.')


def _number(file, config, key, default=None) -> float:
  value = default if config.get(key) is None else config[key]
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e30:
    raise UserError(f'{file}: {key} is {_short(value)}; it must be a positive number of a sensible size.')
  return float(value)


def _whole(file, config, key, default=None) -> int:
  value = _number(file, config, key, default)
  if value != int(value) or value > LARGEST:
    raise UserError(f'{file}: {key} is {value}; it must be a whole number of at most {LARGEST:,}.')
  return int(value)


def _short(value) -> str:
  """A value as JSON, cut where it is long."""
  text = json.dumps(value)
  return text if len(text) < 40 else f'{text[:40]}...'


def _layers(file, config) -> tuple[list[str], dict]:
  """The kind of each layer, and the window where one has it."""
  family, count = config['model_type'], _whole(file, config, 'num_hidden_layers')
  if count > MOST_LAYERS:
    raise UserError(f'{file}: num_hidden_layers is {count}; at most {MOST_LAYERS:,} are supported.')
  window = config.get('sliding_window', 4096 if family == 'mistral' else None)
  if family == 'mistral':
    types = ['full_attention' if window is None else 'sliding_attention'] * count
  elif family == 'llama':
    types = ['full_attention'] * count
  elif config.get('layer_types') is not None:
    types = config['layer_types']
  elif family == 'qwen3_5_text':
    every = _whole(file, config, 'full_attention_interval', 4)
    types = ['linear_attention' if (i + 1) % every else 'full_attention' for i in range(count)]
  else:
    first = _whole(file, config, 'max_window_layers', 28) if config.get('use_sliding_window') else count
    types = ['full_attention' if i < first else 'sliding_attention' for i in range(count)]
  if not isinstance(types, list) or len(types) != count:
    raise UserError(f'{file}: layer_types does not list the {count} layers; correct either.')
  kinds = [LAYER_TYPES.get(str(name)) for name in types]
  for name, kind in zip(types, kinds):
    if kind not in FAMILIES[family].kinds:
      raise UserError(f'{file}: layer type {name!r} is not supported in a {family} model.')
  return kinds, {'window': _whole(file, config, 'sliding_window', window)} if 'window' in kinds else {}


def _rope(file, config) -> dict:
  """rope_theta, rotary_fraction and rope_scaling, from the new form of config.json or the old."""
  family = FAMILIES[config['model_type']]
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
    raise UserError(f'{file}: RoPE parameters for each layer type are not supported.')
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind not in ('default', 'llama3'):
    raise UserError(f'{file}: rope scaling {kind!r} is not supported; '
                    'use a checkpoint with default or llama3.')
  both = {**config, **rope}
  fraction = _number(file, both, 'partial_rotary_factor', family.rotary_fraction)
  if fraction > 1 or (fraction < 1 and family.rotary_fraction == 1):
    raise UserError(f'{file}: partial_rotary_factor {fraction} is not supported in this architecture.')
  scaling = tuple(_number(file, rope, key) for key in LLAMA3) if kind == 'llama3' else ()
  return {'rope_theta': _number(file, both, 'rope_theta', 1e4), 'rotary_fraction': fraction,
          'rope_scaling': scaling}


def family_of(model: ModelConfig) -> str:
  """The model_type that computes what `model` does; UserError where none does."""
  kinds = set(model.pattern)
  for name, family in FAMILIES.items():
    same = all(getattr(model, key) == value for key, value in family.fixed.items())
    whole = model.rotary_fraction == 1 or family.rotary_fraction != 1
    one_kind = name != 'mistral' or kinds == {'window'}
    if same and whole and one_kind and kinds <= set(family.kinds):
      return name
  raise UserError('no Hugging Face architecture has this combination of layer kinds, norms, gate and '
                  f'RoPE ({", ".join(sorted(kinds))}); export a model of a preset named after one.')


def make_config(model: ModelConfig, dtype: str, base: dict) -> dict:
  """config.json of `model`; entries of `base` (a config.json) that say nothing of its shape are kept.

  RoPE stands in the form of transformers 5 and, beside it, in the older one.
  """
  name = family_of(model)
  drop = ('quantization_config', 'rope_scaling', 'partial_rotary_factor', 'sliding_window', 'layer_types',
          'full_attention_interval', 'auto_map', '_name_or_path', 'architectures')
  config = {k: v for k, v in text_config(base).items() if k not in drop and not k.startswith('mtp_')}
  rope = {'rope_type': 'default', 'rope_theta': model.rope_theta}
  if model.rope_scaling:
    rope |= {'rope_type': 'llama3', **dict(zip(LLAMA3, model.rope_scaling))}
    rope[LLAMA3[-1]] = int(rope[LLAMA3[-1]])
    config['rope_scaling'] = {k: v for k, v in rope.items() if k != 'rope_theta'}
  if name == 'qwen3_5_text':
    rope['partial_rotary_factor'] = config['partial_rotary_factor'] = model.rotary_fraction
    config |= {theirs: getattr(model, ours) for ours, theirs in DELTA.items()} | {'attn_output_gate': True}
  if name.startswith('qwen'):
    types = {kind: theirs for theirs, kind in LAYER_TYPES.items()}
    config['layer_types'] = [types[kind] for kind in model.pattern * model.repeats]
  if name in ('qwen3', 'mistral'):
    windowed = 'window' in model.pattern
    config['sliding_window'] = model.window if windowed else None
    if name == 'qwen3':
      config['use_sliding_window'] = windowed
  config.setdefault('max_position_embeddings', model.max_positions)
  return config | {
      'architectures': [FAMILIES[name].architecture], 'model_type': name,
      'dtype': dtype, 'torch_dtype': dtype,
      'vocab_size': model.vocab_size, 'hidden_size': model.width, 'intermediate_size': model.mlp_width,
      'num_hidden_layers': model.layers, 'num_attention_heads': model.heads,
      'num_key_value_heads': model.kv_heads, 'head_dim': model.head_dim, 'hidden_act': 'silu',
      'rms_norm_eps': model.norm_eps, 'attention_bias': False, 'attention_dropout': 0.0,
      'rope_parameters': rope, 'rope_theta': model.rope_theta,
      'tie_word_embeddings': model.tied_embeddings}
