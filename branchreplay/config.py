"""Frozen configurations, presets and their validation.

Every mistake a user can make in a configuration raises `UserError` with one
sentence that says what is wrong and what to do; experiments print it and exit
with status 2.
"""
import dataclasses

LAYER_KINDS = ('full', 'window', 'deltanet')
ALL_SEGMENTS = 2**30  # more segments than any prefix has


class UserError(Exception):
  """A mistake in the user's input; its text is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder whose layers repeat a pattern; letters are the README glossary's."""
  vocab_size: int = 256  # V
  width: int = 64  # D
  mlp_width: int = 128  # F
  pattern: tuple[str, ...] = ('full',)  # kinds of layer, in order
  repeats: int = 2  # how often the pattern is repeated
  heads: int = 4  # query heads, H = K * G
  kv_heads: int = 2  # K
  head_dim: int = 32  # h
  rope_theta: float = 1e6
  rotary_fraction: float = 1.0  # share of head_dim that is rotated
  qk_norm: bool = True  # RMSNorm of each query and key head
  output_gate: bool = False  # sigmoid gate on the attention output (Qwen3-Next)
  window: int = 128  # positions a 'window' layer sees, its own included
  delta_key_heads: int = 2
  delta_value_heads: int = 4
  delta_key_dim: int = 32
  delta_value_dim: int = 32
  conv_width: int = 4  # taps of the short causal convolution
  chunk: int = 32  # positions per chunk of the delta rule
  norm_offset: float = 0.0  # 1.0: zero-centred RMSNorm, scale is 1 + w
  norm_eps: float = 1e-6
  tied_embeddings: bool = False
  max_positions: int = 2**23  # longest sequence the RoPE tables serve

  @property
  def layers(self) -> int:
    return self.repeats * len(self.pattern)

  @property
  def rotary_dim(self) -> int:
    return int(self.head_dim * self.rotary_fraction) // 2 * 2

  @property
  def attention_per_repeat(self) -> int:
    return sum(kind != 'deltanet' for kind in self.pattern)

  @property
  def deltanet_per_repeat(self) -> int:
    return sum(kind == 'deltanet' for kind in self.pattern)


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """Static sizes of a capture and its replays: a change of any one recompiles."""
  segment_len: int = 512  # positions of a prefix segment, over all devices
  branch_segment_len: int = 64  # positions of a branch segment, over all devices
  prefix_capacity: int = 1024  # prefix positions the state can hold
  branch_capacity: int = 64  # tokens of the longest branch
  replay_batch: int = 1  # branches replayed at once; memory grows with it
  mode: str = 'exact'  # exact | detached | depth=K: prefix segments to pull through
  key_block: int = 512  # keys per block of the attention loops
  row_block: int = 1024  # query rows per block of the attention loops
  vocab_rows: int = 1024  # positions whose logits exist at once
  shard_params: bool = False  # split parameters and gradients over `seq`
  accumulate_dtype: str = 'float32'  # sums of gradients and of dK/dV

  @property
  def prefix_segments(self) -> int:
    return max(1, -(-self.prefix_capacity // self.segment_len))

  @property
  def branch_segments(self) -> int:
    return max(1, -(-self.branch_capacity // self.branch_segment_len))

  @property
  def pull_depth(self) -> int:
    """How many of the last prefix segments the pull goes through."""
    if self.mode.startswith('depth='):
      return int(self.mode[6:])
    return {'exact': ALL_SEGMENTS, 'detached': 0}[self.mode]


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """GRPO (Shao et al. 2024, arXiv:2402.03300)."""
  clip_low: float = 0.2
  clip_high: float = 0.2
  kl_coef: float = 0.0  # weight of the KL term to the reference policy
  normalize: str = 'token'  # token: mean over the group's tokens | sequence: mean of sequence means


PRESETS = {
    'tiny-dense': ModelConfig(),
    'tiny-hybrid': ModelConfig(
        pattern=('deltanet', 'full'), repeats=1, head_dim=16, rotary_fraction=0.25,
        output_gate=True, delta_key_heads=4, delta_key_dim=16, delta_value_dim=16,
        norm_offset=1.0),
    'tiny-window': ModelConfig(
        pattern=('deltanet', 'window'), repeats=2, head_dim=16, rotary_fraction=0.5,
        delta_key_dim=16, delta_value_dim=16, window=96, tied_embeddings=True),
}


def preset(name: str) -> ModelConfig:
  """The preset called `name`; UserError lists the names there are."""
  if name not in PRESETS:
    raise UserError(f'unknown model {name!r}; the presets are {", ".join(PRESETS)}.')
  return PRESETS[name]


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
  _require(len(model.pattern) > 0, 'the layer pattern is empty; name at least one layer kind.')
  _require(model.heads % model.kv_heads == 0,
           f'heads={model.heads} is not a multiple of kv_heads={model.kv_heads}; change either.')
  _require(model.delta_value_heads % model.delta_key_heads == 0,
           f'delta_value_heads={model.delta_value_heads} is not a multiple of '
           f'delta_key_heads={model.delta_key_heads}; change either.')


def check_replay(replay: ReplayConfig, seq: int, branches: int) -> None:
  """Raises UserError where `replay` does not fit `seq` devices or `branches` branches."""
  _require(branches >= 1, f'branches={branches}; a group needs at least one branch.')
  for name in ('segment_len', 'branch_segment_len', 'replay_batch', 'key_block', 'row_block', 'vocab_rows'):
    _require(getattr(replay, name) >= 1, f'{name} is {getattr(replay, name)}; it must be at least 1.')
  for name in ('segment_len', 'branch_segment_len'):
    length = getattr(replay, name)
    _require(length % seq == 0,
             f'{name}={length} is not divisible by the {seq} devices of the seq axis; '
             f'use {name}={-(-length // seq) * seq}.')
  check_mode(replay.mode)


def check_mode(mode: str) -> None:
  """Raises UserError unless `mode` is exact, detached or depth=K with K >= 0."""
  depth = mode[6:] if mode.startswith('depth=') else None
  _require(mode in ('exact', 'detached') or (depth is not None and depth.isdecimal()),
           f'unknown mode {mode!r}; use exact, detached or depth=K with K a whole number.')


def check_objective(objective: ObjectiveConfig) -> None:
  """Raises UserError for a coefficient out of range or an unknown normalisation."""
  _require(objective.normalize in ('token', 'sequence'),
           f'unknown normalize {objective.normalize!r}; use token or sequence.')
  for name in ('clip_low', 'clip_high', 'kl_coef'):
    _require(getattr(objective, name) >= 0, f'{name}={getattr(objective, name)}; it must not be negative.')
