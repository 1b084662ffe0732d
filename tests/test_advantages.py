"""Advantages: hand-worked numbers, exact zeros, refused rewards, GAE against golden values."""
import itertools
from pathlib import Path

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import advantages
from branchreplay.config import UserError

CASES = Path(__file__).parent / 'cases' / 'objectives'
ESTIMATES = [advantages.group_advantages, advantages.centered_advantages, advantages.rloo_advantages]


def close(got, want, rtol=1e-10):
  np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-12)


def test_hand_worked():
  rewards = [1, 0, 0, 0]
  close(advantages.plain_advantages(rewards), rewards)
  close(advantages.centered_advantages(rewards), [0.75, -0.25, -0.25, -0.25])
  close(advantages.group_advantages(rewards), np.array([3, -1, -1, -1]) / np.sqrt(3))
  close(advantages.rloo_advantages(rewards), [1, -1 / 3, -1 / 3, -1 / 3])
  close(advantages.group_advantages([1, 0]), [1, -1])  # edge case 9


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, np.nan]), min_size=3, max_size=8), st.integers(1, 3))
def test_widest_subset_has_the_largest_variance(rewards, count):
  """Against all subsets; rewards that are not finite only where there are too few others."""
  got = advantages.widest_subset(rewards, count)
  assert len(set(got)) == count and list(got) == sorted(got)
  rewards = np.array(rewards)
  finite = np.flatnonzero(np.isfinite(rewards))
  if len(finite) < count:
    assert set(finite) <= set(got)
  else:
    best = max(np.var(rewards[list(c)]) for c in itertools.combinations(finite, count))
    close(np.var(rewards[got]), best)


def test_widest_subset_by_hand():
  assert list(advantages.widest_subset([0, 0, 1, 0, 0, 0], 2)) == [2, 5]  # a rare success is kept
  assert list(advantages.widest_subset([1, 1, 1], 2)) == [0, 1] and list(advantages.widest_subset([5, 4], 2)) == [0, 1]


@pytest.mark.parametrize('estimate', ESTIMATES)
@pytest.mark.parametrize('rewards', [
    np.full(6, 0.1, np.float32),  # edge case 10: the float32 std is 8e-9
    [0.1 + 0.2, 0.3, 0.3],  # equal but for the last bit
    [np.float32(0.1), 0.1],
    np.zeros(4), np.full(3, -7.0), np.full(3, 1e30), np.full(2, 1e-30),
    [0.7],  # edge case 11: a group of one
    [],
])
def test_equal_rewards_give_exactly_zero(estimate, rewards):
  got = estimate(rewards)
  assert got.dtype == np.float64 and got.shape == (len(rewards),) and not got.any()


@pytest.mark.parametrize('estimate', [*ESTIMATES, advantages.plain_advantages])
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_nonfinite_reward_is_named_and_refused(estimate, bad):
  with pytest.raises(UserError, match=f'reward of response 1 is {bad}.*drop_nonfinite_rewards'):
    estimate([1, bad, 0, 0])


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_dropped_reward_does_not_count(bad):  # edge case 12
  rewards = [1, bad, 0, 0]
  close(advantages.centered_advantages(rewards, True), [2 / 3, 0, -1 / 3, -1 / 3])
  close(advantages.rloo_advantages(rewards, True), [1, 0, -1 / 2, -1 / 2])
  close(advantages.group_advantages(rewards, True), [2**.5, 0, -(.5**.5), -(.5**.5)])
  close(advantages.plain_advantages(rewards, True), [1, 0, 0, 0])
  for estimate in ESTIMATES:
    assert not estimate([bad, 1, bad], True).any() and not estimate([bad], True).any()


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9))
def test_rloo_leaves_one_out(rewards):
  if advantages.all_equal(rewards):
    return
  others = [np.mean(np.delete(rewards, i)) for i in range(len(rewards))]
  np.testing.assert_allclose(advantages.rloo_advantages(rewards), rewards - np.array(others), atol=1e-10)


def test_each_objective_gets_its_own():
  rewards = [1, 0, 0, 0]
  for name, first in {'reinforce': 1, 'rloo': 1, 'dr_grpo': 0.75, 'grpo': 3**.5, 'gspo': 3**.5}.items():
    close(advantages.branch_advantages(name, rewards)[0], first)


def test_informative_groups():
  rewards = [[1, 1, 1], [0, 1, 1], [0, 0, 0], [0.1, np.float32(0.1), 0.1], [np.nan, 1, 0], [np.nan, 1, 1]]
  assert advantages.informative(rewards).tolist() == [False, True, False, False, True, False]


def test_overlong_penalty():
  close(advantages.overlong_penalty([0, 80, 81, 90, 100, 101, 500], 100, 20),
        [0, 0, -0.05, -0.5, -1, -1, -1])
  close(advantages.overlong_penalty([99, 100, 101], 100, 0), [0, 0, -1])


def test_token_rewards_stand_on_the_last_unmasked_token():
  mask = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]], np.float32)
  close(advantages.token_rewards([1, 2, 3, 4, 5], mask),
        [[0, 0, 1], [0, 0, 2], [0, 3, 0], [0, 4, 0], [0, 0, 0]])


def test_penalized_rewards():
  kl, mask = [[1.0, 2.0], [3.0, np.nan]], [[1, 1], [1, 0]]
  close(advantages.penalized_rewards([1, 2], kl, mask, 0.1), [0.7, 1.7])
  close(advantages.penalized_rewards([[0, 1], [2, 0]], kl, mask, 0.1), [[-0.1, 0.8], [1.7, 0]])


def test_gae_by_hand():
  # delta = [.9 * 1 - 2, .9 * 3 - 1, 4 - 3] = [-1.1, 1.7, 1], decay .45
  got, returns = advantages.gae(np.array([[0., 0, 4, 9]]), np.array([[2., 1, 3, 9]]),
                                np.array([[1, 1, 1, 0]]), 0.9, 0.5)
  close(got, [[-1.1 + .45 * 2.15, 2.15, 1, 0]])
  close(returns, [[.9 - 1.1 + .45 * 2.15 + 1.1, 3.15, 4, 0]])


def test_gae_lambda_one_is_the_return_to_go():
  rewards, values = np.random.default_rng(0).normal(size=(2, 3, 5))
  _, returns = advantages.gae(rewards, values, np.ones((3, 5)), 1.0, 1.0)
  close(returns, np.cumsum(rewards[:, ::-1], 1)[:, ::-1])


def test_gae_steps_over_masked_tokens():
  rewards, values = np.random.default_rng(1).normal(size=(2, 1, 6))
  mask = np.array([[0, 1, 1, 0, 1, 0]])
  holes = advantages.gae(np.where(mask, rewards, np.nan), np.where(mask, values, np.nan), mask, 0.9, 0.8)
  kept = mask[0] > 0
  dense = advantages.gae(rewards[:, kept], values[:, kept], np.ones((1, 3)), 0.9, 0.8)
  for got, want in zip(holes, dense):
    close(got[:, kept], want)
    assert not got[:, ~kept].any()
  nothing = advantages.gae(rewards, values, 0 * mask, 0.9, 0.8)
  assert not nothing[0].any() and not nothing[1].any()


def test_gae_runs_under_jit_on_stacked_groups():
  rewards, values = np.random.default_rng(2).normal(size=(2, 2, 3, 5))
  mask = np.random.default_rng(3).random((2, 3, 5)) > 0.3
  got = jax.jit(advantages.gae)(rewards, values, mask, 0.9, 0.8)[0]
  for n in range(2):
    close(got[n], advantages.gae(rewards[n], values[n], mask[n], 0.9, 0.8)[0])


def test_gae_and_whitening_match_tunix():
  case = dict(np.load(CASES / 'dense_small' / 'golden_ppo.npz'))
  raw, returns = advantages.gae(case['rewards'], case['values'], case['mask'], case['gamma'], case['lam'])
  close(raw, case['advantages_raw'], 1e-9)
  close(returns, case['returns'], 1e-9)
  white, want = advantages.whiten(raw, case['mask']), case['advantages_whitened']
  assert np.linalg.norm(white - want) <= 1e-9 * np.linalg.norm(want)  # Tunix divides by the count + 1e-8


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_whitening_of_nothing_one_or_equal_values_is_zero(dtype):
  values = jnp.full((2, 3), 0.1, dtype).at[0, 0].set(jnp.nan)
  for mask in ([[0, 0, 0], [0, 0, 0]], [[0, 1, 0], [0, 0, 0]], [[0, 1, 1], [1, 1, 1]]):
    got = advantages.whiten(values, jnp.array(mask, dtype))
    assert got.dtype == dtype and not got.any()


def test_whitening_by_hand():
  got = advantages.whiten(np.array([[1., 3, np.nan]]), np.array([[1, 1, 0]]))
  close(got, np.array([[-1, 1, 0]]) / np.sqrt(2 + 1e-8))


@pytest.mark.parametrize('rewards, order, real', [
    ([0.0, 3.0, 1.0, 2.0], [1, 0, 3, 2], [True] * 4), ([1.0, 1.0], [0, 1], [False] * 2),
    ([0.0, 1.0, 0.5], [1, 0], [True] * 2), ([np.nan, 1.0, 0.0, 2.0], [3, 0, 1, 2], [False, False, True, True]),
    ([1.0], [], [])])
def test_preference_order(rewards, order, real):
  got, marks = advantages.preference_order(np.array(rewards))
  assert got.tolist() == order and marks.tolist() == real
