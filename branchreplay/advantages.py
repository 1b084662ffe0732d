"""Advantages: from the rewards of a group's branches to weights of branches or tokens.

Host-side and numpy, float64, but for `gae` and `whiten`, which are JAX functions.
Letters: N groups, G branches, R tokens of the longest branch.
"""
from jax import lax
import jax.numpy as jnp
import numpy as np

from branchreplay.config import UserError

EQUAL = 4 * np.finfo(np.float32).eps  # rewards that differ by less, relatively, are equal


def usable_rewards(rewards, drop_nonfinite: bool = False) -> tuple[np.ndarray, np.ndarray]:
  """Rewards [G] in float64 and which of them are finite, bool [G].

  A non-finite reward raises UserError naming it, unless `drop_nonfinite`.
  """
  rewards = np.asarray(rewards, np.float64)
  good = np.isfinite(rewards)
  if not good.all() and not drop_nonfinite:
    at = int(np.flatnonzero(~good)[0])
    raise UserError(f'the reward of response {at} is {rewards[at]}; correct the reward function, '
                    'or drop such responses with --drop_nonfinite_rewards.')
  return rewards, good


def all_equal(rewards) -> bool:
  """Whether rewards [G] differ by no more than float32 rounding; also where there are none."""
  rewards = np.asarray(rewards, np.float64)
  return rewards.size == 0 or np.ptp(rewards) <= EQUAL * np.abs(rewards).max()


def plain_advantages(rewards, drop_nonfinite: bool = False) -> np.ndarray:
  """The rewards themselves [G]; a dropped one gets 0 (REINFORCE, Williams 1992, no baseline)."""
  rewards, good = usable_rewards(rewards, drop_nonfinite)
  return np.where(good, rewards, 0.0)


def centered_advantages(rewards, drop_nonfinite: bool = False) -> np.ndarray:
  """r - mean of the group [G] (Dr. GRPO, arXiv:2503.20783).

  Equal rewards or a group of one: exactly 0. A dropped reward gets 0 and does not count.
  """
  rewards, good = usable_rewards(rewards, drop_nonfinite)
  out = np.zeros_like(rewards)
  if not all_equal(rewards[good]):
    out[good] = rewards[good] - rewards[good].mean()
  return out


def group_advantages(rewards, drop_nonfinite: bool = False) -> np.ndarray:
  """(r - mean) / std of the group [G] (GRPO, arXiv:2402.03300 section 4.1.2).

  Equal rewards or a group of one: exactly 0 (the std is 0 up to rounding and must
  not be divided by). A dropped reward gets 0 and does not count. The std is the
  population's.
  """
  centered = centered_advantages(rewards, drop_nonfinite)
  if not centered.any():
    return centered
  return centered / np.asarray(rewards, np.float64)[np.isfinite(rewards)].std()


def widest_subset(rewards, count: int) -> np.ndarray:
  """Indices [count], ascending, of the rewards [S] whose variance is the largest (PODS, arXiv:2504.13818).

  That subset is some lowest and some highest rewards. Rewards that are not finite come
  last; equal rewards: the first `count`.
  """
  rewards = np.asarray(rewards, np.float64)
  good = np.flatnonzero(np.isfinite(rewards))
  if len(good) <= count or all_equal(rewards[good]):
    return np.sort(np.concatenate([good, np.flatnonzero(~np.isfinite(rewards))])[:count])
  order = good[np.argsort(rewards[good], kind='stable')]
  subsets = [np.concatenate([order[:low], order[len(order) - count + low:]]) for low in range(count + 1)]
  return np.sort(max(subsets, key=lambda subset: rewards[subset].var()))


def rloo_advantages(rewards, drop_nonfinite: bool = False) -> np.ndarray:
  """r_i - mean of the other rewards [G] (RLOO, arXiv:2402.14740).

  Equal rewards or a group of one (which has no others): exactly 0. A dropped
  reward gets 0 and does not count.
  """
  count = np.isfinite(np.asarray(rewards, np.float64)).sum()
  return centered_advantages(rewards, drop_nonfinite) * (count / max(count - 1, 1))


def branch_advantages(objective: str, rewards, drop_nonfinite: bool = False) -> np.ndarray:
  """Advantages [G] of rewards [G], as the objective called `objective` wants them."""
  functions = {'reinforce': plain_advantages, 'rloo': rloo_advantages, 'dr_grpo': centered_advantages}
  return functions.get(objective, group_advantages)(rewards, drop_nonfinite)


def informative(rewards) -> np.ndarray:
  """Which groups of rewards [N, G] have a gradient: not all equal, bool [N].

  DAPO's dynamic sampling (arXiv:2503.14476 eq. 11) draws groups until N of them
  are. Non-finite rewards do not count.
  """
  rewards = np.asarray(rewards, np.float64)
  return np.array([not all_equal(row[np.isfinite(row)]) for row in rewards], bool)


def preference_order(rewards) -> tuple[np.ndarray, np.ndarray]:
  """Pairs of a group's branches for the preference objectives: order [G] and real, bool [G].

  The best is chosen over the worst, the second over the last but one, and so on:
  order[2i] is chosen over order[2i + 1]. real is False for pairs of equal rewards, for
  non-finite ones and for the branch in the middle of an odd group, which is left out of order.
  """
  rewards = np.asarray(rewards, np.float64)
  ranked = np.argsort(np.where(np.isfinite(rewards), -rewards, np.inf), kind='stable')
  pairs = rewards.size // 2
  order = np.stack([ranked[:pairs], ranked[::-1][:pairs]], 1)
  better, worse = rewards[order].T
  real = np.isfinite(better) & np.isfinite(worse) & (better > worse)
  return order.reshape(-1), np.repeat(real, 2)


def overlong_penalty(lengths, max_length: int, buffer: int) -> np.ndarray:
  """What to add to the rewards of branches of `lengths` tokens [G] (DAPO, arXiv:2503.14476 eq. 13).

  0 up to max_length - buffer, falling linearly to -1 at max_length, -1 beyond.
  buffer 0: -1 beyond max_length, else 0.
  """
  over = np.asarray(lengths, np.float64) - (max_length - buffer)
  if buffer == 0:
    return np.where(over > 0, -1.0, 0.0)
  return -np.clip(over / buffer, 0.0, 1.0)


def token_rewards(rewards, mask) -> np.ndarray:
  """Rewards [G] put on the last unmasked token of each branch, [G, R]; none where all are masked."""
  mask = np.asarray(mask) > 0
  after = np.cumsum(mask[:, ::-1], 1)[:, ::-1]  # unmasked tokens from here on, this one included
  return np.where(mask & (after == 1), np.asarray(rewards, np.float64)[:, None], 0.0)


def penalized_rewards(rewards, kl, mask, coef: float) -> np.ndarray:
  """Rewards less coef times the KL estimates kl [G, R] (KL in the reward, not in the loss).

  rewards [G]: less the branch's sum (arXiv:2203.02155 eq. 2); [G, R]: token by token.
  """
  penalty = coef * np.where(np.asarray(mask) > 0, np.asarray(kl, np.float64), 0.0)
  rewards = np.asarray(rewards, np.float64)
  return rewards - (penalty.sum(1) if rewards.ndim == 1 else penalty)


def gae(rewards, values, mask, gamma: float, lam: float):
  """Generalised advantage estimates (arXiv:1506.02438 eq. 16), advantages and returns [..., R].

  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  returns = A + V,
  V and A being 0 after a branch's last unmasked token. Masked tokens are stepped
  over, as if the branch were its unmasked tokens only, and get 0.
  """
  def step(carry, xs):
    next_value, next_advantage = carry
    reward, value, real = xs
    advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
    carry = jnp.where(real, value, next_value), jnp.where(real, advantage, next_advantage)
    return carry, jnp.where(real, advantage, 0)

  rewards, values, mask = jnp.broadcast_arrays(rewards, values, mask)
  time_first = [jnp.moveaxis(x, -1, 0) for x in (rewards, values, mask > 0)]
  zeros = jnp.zeros(values.shape[:-1], jnp.result_type(rewards, values))
  _, advantages = lax.scan(step, (zeros, zeros), time_first, reverse=True)
  advantages = jnp.moveaxis(advantages, 0, -1)
  return advantages, jnp.where(mask > 0, advantages + values, 0)


def whiten(values, mask):
  """(x - mean) / sqrt(var + 1e-8) over the unmasked entries of an array of any shape.

  The variance is Bessel's (N - 1). 0 where masked, and everywhere if all unmasked
  entries are equal. Give it all groups of a batch at once.
  """
  real = mask > 0
  count = real.sum()
  mean = jnp.where(real, values, 0).sum() / jnp.maximum(count, 1)
  centered = jnp.where(real, values - mean, 0)
  variance = (centered**2).sum() / jnp.maximum(count - 1, 1)
  spread = jnp.where(real, values, -jnp.inf).max() > jnp.where(real, values, jnp.inf).min()
  return jnp.where(spread, centered * lax.rsqrt(variance + 1e-8), 0)
