"""Frozen configurations, presets and their validation.

Every mistake a user can make in a configuration raises `UserError` with one
sentence that says what is wrong and what to do; experiments print it and exit
with status 2.
"""
import dataclasses
import math

LAYER_KINDS = ('full', 'window', 'deltanet')
LORA_TARGETS = ('q', 'k', 'v', 'out', 'gate', 'qkv', 'z', 'beta', 'decay', 'up', 'down')  # matrices of a layer
ATTENTIONS = ('auto', 'blocks', 'tokamax', 'cudnn')  # see kernels.py
# Of a prefix's forward: its state only; attention's output and LSE; each layer's input too. Of branches': see gradients.kept_of_branches.
KEEPS = ('state', 'attention', 'layers')
DTYPES = ('bfloat16', 'float32', 'float64')
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
  rope_scaling: tuple[float, ...] = ()  # llama3: (factor, low, high frequency factor, positions); (): none
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
  lora_rank: int = 0  # of the trained update beside each frozen matrix of lora_targets; 0: all is trained
  lora_alpha: float = 16.0  # the update is scaled by lora_alpha / lora_rank
  lora_targets: tuple[str, ...] = ('q', 'k', 'v', 'out', 'qkv', 'z')  # fields of model.py's layers, LORA_TARGETS
  critic: bool = False  # a value head beside the vocabulary's, for ppo
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
  block_len: int = 1  # branch tokens that see each other in attention (block diffusion); 1: causal
  replay_batch: int = 1  # branches replayed at once; memory grows with it
  mode: str = 'exact'  # exact | detached | depth=K: prefix segments to pull through
  keep: str = 'state'  # state | attention | layers | auto: what the way back need not compute again, by the memory there is
  attention: str = 'blocks'  # blocks | auto, tokamax or cudnn: kernels of an accelerator, see accelerators.settle
  key_block: int = 256  # keys per block of the attention loops
  row_block: int = 128  # query rows per block of the attention loops
  vocab_rows: int = 1024  # positions whose logits exist at once
  shard_params: bool = False  # split parameters and gradients over `seq`
  offload: bool = False  # keep dK/dV of the prefix and the recurrent states kept for the pull in the host's memory
  accumulate_dtype: str = 'float32'  # sums of gradients and of dK/dV
  cotangent_dtype: str = ''  # of dK/dV of the prefix's slots, if not accumulate_dtype; bfloat16 halves them and rounds each sum
  history_dtype: str = ''  # of the recurrent states kept for the pull, if not their own; bfloat16 halves them and rounds each

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

  @property
  def kept(self) -> str:
    """What a capture keeps: nothing for a pull that never comes, or while `auto` is not settled."""
    return self.keep if self.pull_depth and self.keep in KEEPS else 'state'


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """Coefficients of the objectives; each uses those its docstring names."""
  clip_low: float = 0.2  # a ratio below 1 - clip_low counts no further
  clip_high: float = 0.2  # a ratio above 1 + clip_high counts no further
  kl_coef: float = 0.0  # weight of the KL term to the reference policy
  normalize: str = 'token'  # token: mean over tokens | sequence: mean of sequence means | fixed
  fixed_length: int = 0  # tokens normalize=fixed divides a branch's sum by; 0: the capacity
  kl_kind: str = 'k3'  # estimator of the KL term: k1 | k2 | k3
  kl_in: str = 'loss'  # loss | reward: the trainer takes kl_coef KL off the rewards instead
  kl_weighted: bool = False  # KL term in the loss times the ratio, so that it is right off-policy
  entropy_coef: float = 0.0  # weight of the entropy bonus
  importance_cap: float = 2.0  # cap of the trainer/sampler ratio, with a sampler's log-probs; 0: none
  gamma: float = 1.0  # PPO: discount of a reward one token later
  lam: float = 0.95  # PPO: lambda of the generalised advantage estimate
  value_coef: float = 0.5  # PPO: weight of the value loss
  value_clip: float = 0.2  # PPO: how far a value counts as moved in one rollout; 0: no limit
  preference_beta: float = 0.1  # DPO and its kin: weight of the margin
  label_smoothing: float = 0.0  # DPO and its kin: share of pairs taken to be the wrong way round
  target_margin: float = 0.0  # SimPO: what preference_beta times the margin is to exceed


OBJECTIVE_PRESETS = {  # where a paper's coefficients are not the defaults
    'reinforce': ObjectiveConfig(normalize='fixed', fixed_length=1),
    'rloo': ObjectiveConfig(normalize='fixed', fixed_length=1),
    'dapo': ObjectiveConfig(clip_high=0.28),
    'gspo': ObjectiveConfig(clip_low=3e-4, clip_high=4e-4, normalize='sequence'),
    'dpo_norm': ObjectiveConfig(preference_beta=5.0),
    'simpo': ObjectiveConfig(preference_beta=2.0, target_margin=1.0),
}


def objective_preset(name: str) -> ObjectiveConfig:
  """The coefficients of the paper of the objective called `name`, else the defaults."""
  return OBJECTIVE_PRESETS.get(name, ObjectiveConfig())


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Supervised warm-up, then reinforcement learning; defaults are the quickstart's."""
  task: str = 'needle'  # needle: facts in real text | recall: facts in random filler
  prompt_len: int = 1024  # tokens of a training prompt; with data_file: of the longest
  init: str = ''  # Hugging Face checkpoint folder to start from, instead of a preset and a warm-up
  tokenizer: str = 'auto'  # bytes, a folder with tokenizer.json, or auto: that of init where it has one
  data_file: str = ''  # JSONL with prompt and answer, instead of a task; see data.py
  eval_file: str = ''  # the same of held-out prompts; without it every tenth record is held out
  offline: bool = False  # train on the responses and rewards of data_file; needs an eval_file with answers
  reward: str = 'exact_match'  # of data_file: exact_match | contains | regex | math_number | module:function
  long_prompts: str = 'refuse'  # refuse | truncate (on the left), prompts longer than prompt_len
  prompts: int = 8  # prompts (groups) of an update
  branches: int = 8  # responses to each prompt, G
  samples: int = 32  # responses sampled, of which the `branches` whose rewards differ most are trained on; 0: branches
  steps: int = 300  # updates
  seed: int = 0  # of initial parameters, data and sampling
  objective: str = 'grpo'  # see objectives.py; coefficients that no flag gives are its paper's
  full_sequence: bool = False  # train on full sequences by plain autodiff instead of replay
  inner_epochs: int = 1  # updates on one batch of rollouts
  refresh_every: int = 1  # updates of inner_epochs on one capture of the prompts; more than 1: on a stale state, see refresh.py
  drift_bound: float = 0.0  # nats a stale state's log-probs may be off before it is made anew; 0: not measured
  groups_at_once: int = 1  # prompts of a device row whose captures are alive at once
  stream: int = 0  # prefix segments of a call: the gradient in steps, with progress; 0: in one program
  save_steps: float = 0.0  # seconds between saves inside a gradient in steps, where a killed run goes on; 0: off
  learning_rate: float = 1e-3  # of AdamW, after the ramp
  ramp_steps: int = 10  # updates over which the learning rate rises from 0
  decay_start: int = 200  # update from which it falls
  decay_steps: int = 100  # updates over which it falls to a tenth; 0: it stays
  weight_decay: float = 0.01  # of AdamW
  lora_rank: int = 0  # of the trained updates beside frozen matrices; 0: all parameters are trained
  lora_alpha: float = 16.0  # such an update is scaled by lora_alpha / lora_rank
  lora_targets: tuple[str, ...] = ModelConfig.lora_targets  # matrices that have one
  clip_norm: float = 1.0  # gradients are scaled down to this global norm
  temperature: float = 1.0  # of sampling; 0: greedy
  top_p: float = 1.0  # nucleus sampling; 1: off
  max_new_tokens: int = 2  # longest response
  resample: int = 4  # dynamic sampling: most further rollouts until `prompts` groups have unequal rewards; 0: off
  overlong_buffer: int = 0  # tokens before max_new_tokens over which a penalty grows to 1 (dapo); 0: off
  drop_nonfinite_rewards: bool = False  # drop responses whose reward is not finite, instead of stopping
  spike_factor: float = 0.0  # skip a gradient whose norm is above so many medians of the last 32; 0: off
  max_policy_kl: float = 0.0  # nats; inner_epochs end where the policy has moved further from the rollout's; 0: off
  on_nonfinite: str = 'skip'  # skip | stop, at a loss or gradient that is not finite
  warmup_updates: int = 300  # most supervised updates on short prompts
  warmup_len: int = 64  # tokens of a short prompt
  warmup_prompts: int = 32  # short prompts of an update
  warmup_long_updates: int = 60  # most supervised updates on prompts of prompt_len
  warmup_learning_rate: float = 5e-3  # of AdamW in the warm-up
  warmup_reward: float = 0.6  # sampled reward at prompt_len that ends the warm-up
  eval_every: int = 50  # updates between evaluations on held-out prompts
  eval_prompts: int = 64  # held-out prompts of an evaluation
  eval_samples: int = 4  # responses sampled for each of them
  checkpoint_every: int = 50  # updates between checkpoints


QWEN3_5 = ModelConfig(  # what the dense Qwen3.5 models share
    vocab_size=248320, pattern=('deltanet',) * 3 + ('full',), head_dim=256, rope_theta=1e7,
    rotary_fraction=0.25, output_gate=True, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128,
    conv_width=4, norm_offset=1.0)

PRESETS = {
    'tiny-dense': ModelConfig(),
    'tiny-hybrid': ModelConfig(
        pattern=('deltanet', 'full'), repeats=1, kv_heads=4, head_dim=16, rotary_fraction=0.25,
        qk_norm=False,  # normed queries and keys of 16 channels are slow to pick one of 1,024 positions
        output_gate=True, delta_key_heads=4, delta_key_dim=16, delta_value_dim=16, norm_offset=1.0),
    'tiny-window': ModelConfig(
        pattern=('deltanet', 'window'), repeats=2, head_dim=16, rotary_fraction=0.5,
        delta_key_dim=16, delta_value_dim=16, window=96, tied_embeddings=True),
    'tiny-mixed': ModelConfig(  # full attention below a recurrent layer: nothing of it falls away where only the state is asked for
        pattern=('full', 'deltanet'), repeats=1, heads=1, kv_heads=1, head_dim=16, rotary_fraction=0.5, output_gate=True,
        delta_key_heads=4, delta_key_dim=16, delta_value_dim=16, norm_offset=1.0),
    # What compare.py, roofline.py and the peers' figures run: Qwen3 and Qwen3.5 of 4 layers.
    'bench': ModelConfig(
        vocab_size=512, width=256, mlp_width=768, repeats=4, head_dim=64),
    'bench-hybrid': dataclasses.replace(
        QWEN3_5, vocab_size=512, width=256, mlp_width=768, repeats=1, heads=4, kv_heads=2, head_dim=64,
        delta_key_heads=2, delta_value_heads=4, delta_key_dim=64, delta_value_dim=64),
    # Shapes of public checkpoints, as the config.json on their Hugging Face pages gives them.
    # Qwen/Qwen3-0.6B, Qwen/Qwen3-8B
    'qwen3-0.6b': ModelConfig(
        vocab_size=151936, width=1024, mlp_width=3072, repeats=28, heads=16, kv_heads=8, head_dim=128,
        tied_embeddings=True),
    'qwen3-8b': ModelConfig(
        vocab_size=151936, width=4096, mlp_width=12288, repeats=36, heads=32, kv_heads=8, head_dim=128),
    # The text part of Qwen/Qwen3.5-0.8B, Qwen/Qwen3.5-4B, Qwen/Qwen3.5-27B (and Qwen/Qwen3.6-27B)
    'qwen3.5-0.8b': dataclasses.replace(
        QWEN3_5, width=1024, mlp_width=3584, repeats=6, heads=8, kv_heads=2, delta_value_heads=16,
        tied_embeddings=True),
    'qwen3.5-4b': dataclasses.replace(
        QWEN3_5, width=2560, mlp_width=9216, repeats=8, heads=16, kv_heads=4, delta_value_heads=32,
        tied_embeddings=True),
    'qwen3.5-27b': dataclasses.replace(
        QWEN3_5, width=5120, mlp_width=17408, repeats=16, heads=24, kv_heads=4, delta_value_heads=48),
    # meta-llama/Llama-3.1-8B
    'llama-3.1-8b': ModelConfig(
        vocab_size=128256, width=4096, mlp_width=14336, repeats=32, heads=32, kv_heads=8, head_dim=128,
        rope_theta=5e5, rope_scaling=(8.0, 1.0, 4.0, 8192.0), qk_norm=False, norm_eps=1e-5),
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
               'eval_every', 'eval_prompts', 'eval_samples', 'checkpoint_every', 'warmup_len', 'warmup_prompts'):
    _require(getattr(train, name) >= 1, f'{name}={getattr(train, name)}; it must be at least 1.')
  for name in ('steps', 'learning_rate', 'ramp_steps', 'decay_start', 'decay_steps', 'weight_decay', 'temperature',
               'seed', 'samples', 'stream', 'save_steps', 'drift_bound', 'spike_factor', 'max_policy_kl', 'resample', 'overlong_buffer', 'warmup_updates',
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
