"""Whether configurations make sense: each check raises `UserError` with what is wrong and what to do."""
import dataclasses
import math

from branchreplay.config import (
    DTYPES, KEEPS, LAYER_KINDS, LORA_TARGETS, ModelConfig, ObjectiveConfig, ReplayConfig, TrainConfig, UserError)


def _require(condition: bool, sentence: str) -> None:
  if not condition:
    raise UserError(sentence)


def check_model(model: ModelConfig) -> None:
  """Raises UserError where the shapes of `model` contradict each other."""
  for kind in model.pattern:
    _require(kind in LAYER_KINDS, f'unknown layer kind {kind!r}; use {", ".join(LAYER_KINDS)}.')
  for name in ('vocab_size', 'width', 'mlp_width', 'repeats', 'heads', 'kv_heads', 'head_dim',
               'window', 'delta_key_heads', 'delta_value_heads', 'conv_width', 'chunk'):
    _require(getattr(model, name) >= 1, f'{name} is {getattr(model, name)}; it must be at least 1.')
  _require(model.lora_rank >= 0, f'lora_rank={model.lora_rank}; it must not be negative.')
  _require(math.isfinite(model.lora_alpha) and model.lora_alpha > 0, f'lora_alpha={model.lora_alpha}; it must be positive.')
  for name in model.lora_targets:
    _require(name in LORA_TARGETS, f'unknown matrix {name!r} in lora_targets; use {", ".join(LORA_TARGETS)}.')
  _require(not model.lora_rank or model.lora_targets, 'lora_targets is empty; name a matrix or use lora_rank=0.')
  _require(len(model.pattern) > 0, 'the layer pattern is empty; name at least one layer kind.')
  _require(model.heads % model.kv_heads == 0,
           f'heads={model.heads} is not a multiple of kv_heads={model.kv_heads}; change either.')
  _require(model.delta_value_heads % model.delta_key_heads == 0,
           f'delta_value_heads={model.delta_value_heads} is not a multiple of '
           f'delta_key_heads={model.delta_key_heads}; change either.')


def check_replay(replay: ReplayConfig, seq: int, branches: int) -> None:
  """Raises UserError where `replay` does not fit `seq` devices or `branches` branches."""
  _require(branches >= 1, f'branches={branches}; a group needs at least one branch.')
  for name in ('segment_len', 'branch_segment_len', 'block_len', 'replay_batch', 'key_block', 'row_block', 'vocab_rows'):
    _require(getattr(replay, name) >= 1, f'{name} is {getattr(replay, name)}; it must be at least 1.')
  for name in ('segment_len', 'branch_segment_len'):
    length = getattr(replay, name)
    _require(length % seq == 0,
             f'{name}={length} is not divisible by the {seq} devices of the seq axis; '
             f'use {name}={-(-length // seq) * seq}.')
  _require(replay.branch_segment_len % replay.block_len == 0,
           f'block_len={replay.block_len} does not divide branch_segment_len={replay.branch_segment_len}; change either.')
  _require(replay.keep in (*KEEPS, 'auto'), f'unknown keep {replay.keep!r}; use {", ".join(KEEPS)} or auto.')
  for name, known in (('accumulate_dtype', DTYPES[1:]), ('cotangent_dtype', ('', *DTYPES)), ('history_dtype', ('', *DTYPES))):
    _require(getattr(replay, name) in known, f'unknown {name} {getattr(replay, name)!r}; use {", ".join(filter(None, known))}.')
  check_mode(replay.mode)


def check_mode(mode: str) -> None:
  """Raises UserError unless `mode` is exact, detached or depth=K with K >= 0."""
  depth = mode[6:] if mode.startswith('depth=') else None
  _require(mode in ('exact', 'detached') or (depth is not None and depth.isdecimal()),
           f'unknown mode {mode!r}; use exact, detached or depth=K with K a whole number.')


def check_objective(objective: ObjectiveConfig) -> None:
  """Raises UserError for a coefficient out of range or an unknown choice."""
  for name, choices in (('normalize', ('token', 'sequence', 'fixed')), ('kl_kind', ('k1', 'k2', 'k3')),
                        ('kl_in', ('loss', 'reward'))):
    value = getattr(objective, name)
    _require(value in choices,
             f'unknown {name} {value!r}; use {", ".join(choices[:-1])} or {choices[-1]}.')
  for name in ('clip_low', 'clip_high', 'kl_coef', 'fixed_length', 'entropy_coef', 'importance_cap',
               'value_coef', 'value_clip', 'target_margin'):
    _require(getattr(objective, name) >= 0,
             f'{name}={getattr(objective, name)}; it must not be negative.')
  for name in ('gamma', 'lam'):
    _require(0 <= getattr(objective, name) <= 1,
             f'{name}={getattr(objective, name)}; it must be from 0 to 1.')
  for name in ('clip_low', 'clip_high', 'kl_coef', 'entropy_coef', 'importance_cap', 'value_coef', 'value_clip',
               'preference_beta', 'target_margin'):
    _require(math.isfinite(getattr(objective, name)),
             f'{name}={getattr(objective, name)}; it must be finite.')
  _require(objective.preference_beta > 0,
           f'preference_beta={objective.preference_beta}; it must be more than 0.')
  _require(0 <= objective.label_smoothing < 0.5,
           f'label_smoothing={objective.label_smoothing}; it must be at least 0 and less than 0.5.')
  _require(not objective.kl_weighted or objective.kl_in == 'loss',
           'kl_weighted is about the KL term in the loss; use kl_in=loss or leave kl_weighted out.')


def check_train(train: TrainConfig, data: int) -> None:
  """Raises UserError for counts or rates out of range; `data` is the number of the mesh's rows."""
  _require(data >= 1, f'data={data}; it must be at least 1.')
  for field in dataclasses.fields(train):
    value = getattr(train, field.name)
    _require(not isinstance(value, float) or math.isfinite(value), f'{field.name}={value}; it must be finite.')
  for name in ('prompt_len', 'prompts', 'branches', 'inner_epochs', 'refresh_every', 'groups_at_once', 'max_new_tokens',
               'eval_every', 'eval_prompts', 'checkpoint_every', 'warmup_len', 'warmup_prompts'):
    _require(getattr(train, name) >= 1, f'{name}={getattr(train, name)}; it must be at least 1.')
  for name in ('steps', 'learning_rate', 'ramp_steps', 'decay_start', 'decay_steps', 'weight_decay', 'temperature',
               'seed', 'samples', 'eval_samples', 'stream', 'save_steps', 'drift_bound', 'spike_factor', 'max_policy_kl', 'resample', 'overlong_buffer', 'warmup_updates',
               'warmup_long_updates', 'warmup_learning_rate'):
    _require(getattr(train, name) >= 0, f'{name}={getattr(train, name)}; it must not be negative.')
  _require(not train.offline or (train.data_file and train.eval_file),
           'offline training reads responses and rewards from --data_file and is evaluated on the answers of --eval_file; give both.')
  _require(train.refresh_every == 1 or not train.full_sequence,
           'full sequences have no state to keep; leave --refresh_every at 1 or --full_sequence out.')
  _require(train.stream == 0 or (train.groups_at_once == train.refresh_every == 1 and not train.full_sequence),
           'a gradient in steps is of one prompt a device row and its own capture; leave --groups_at_once and --refresh_every '
           'at 1 and --full_sequence out, or --stream.')
  _require(train.save_steps == 0 or train.stream > 0, 'save_steps is about a gradient in steps; give --stream too.')
  _require(train.samples == 0 or train.samples >= train.branches,
           f'samples={train.samples} is less than branches={train.branches}; raise it, or 0 samples as many as are trained on.')
  _require(0 < train.top_p <= 1, f'top_p={train.top_p}; it must be above 0 and at most 1.')
  _require(train.clip_norm > 0, f'clip_norm={train.clip_norm}; it must be positive.')
  _require(train.on_nonfinite in ('skip', 'stop'), f'unknown on_nonfinite {train.on_nonfinite!r}; use skip or stop.')
  for name in ('prompts', 'warmup_prompts', 'eval_prompts'):
    _require(getattr(train, name) % data == 0,
             f'{name}={getattr(train, name)} is not a multiple of the data axis ({data}); change either.')
  _require(train.prompts % (data * train.groups_at_once) == 0,
           f'prompts={train.prompts} is not a multiple of data x groups_at_once '
           f'({data * train.groups_at_once}); change either.')
