"""Frozen configurations and presets; checks.py says which are refused.

Every mistake a user can make raises `UserError` with one sentence that says what
is wrong and what to do; experiments print it and exit with status 2.
"""
import dataclasses

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
  replay_batch: int = 1  # branches replayed at once, branch_segment_len tokens of each; memory grows with it
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
  eval_samples: int = 0  # responses sampled for each of them; 0: as many as in training
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
