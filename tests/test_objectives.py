"""Objectives: golden values by TRL and Tunix, hand-worked numbers, edge cases, finite gradients."""
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import objectives
from branchreplay.checks import check_objective
from branchreplay.config import (
    OBJECTIVE_PRESETS, ObjectiveConfig, UserError, objective_preset)
from branchreplay.objectives import Scores, make_objective

CASES = Path(__file__).parent / 'cases' / 'objectives'
POLICY = ['reinforce', 'rloo', 'grpo', 'dapo', 'dr_grpo', 'cispo', 'gspo', 'ppo']
PREFERENCE = ['dpo', 'dpo_norm', 'ipo', 'simpo']
NAMES = [*POLICY, *PREFERENCE, 'nll']
COUPLED = ['gspo', *PREFERENCE]
EVERYTHING = ObjectiveConfig(kl_coef=0.04, kl_weighted=True, entropy_coef=0.01, label_smoothing=0.1,
                             target_margin=0.5)


def close(got, want, rtol=1e-10):
  np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-12)


def make_group(mask, advantages=None, old=None, ref=None, **more):
  array = lambda x: None if x is None else jnp.asarray(x)
  mask = jnp.asarray(mask, float)
  advantages = jnp.zeros(mask.shape[0]) if advantages is None else jnp.asarray(advantages)
  fields = {'sampler_logprobs': None, 'returns': None, 'old_values': None, 'denominator': None} | more
  return SimpleNamespace(mask=mask, length=mask.sum(1).astype(int), advantages=advantages,
                         old_logprobs=array(old), ref_logprobs=array(ref),
                         **{name: array(value) for name, value in fields.items()})


def run(name, config, scores, group):
  """Loss, metrics and cotangents."""
  if not isinstance(scores, Scores):
    scores = Scores(jnp.asarray(scores, float), jnp.zeros(group.mask.shape))
  objective = make_objective(name, config)
  (loss, metrics), grads = jax.value_and_grad(lambda s: objective.loss(s, group), has_aux=True)(scores)
  return loss, metrics, grads


def random_case(seed=0, shape=(4, 5), critic=True, **more):
  """Scores and a group with all that any objective reads; branch 1 is empty, branch 2 has one token."""
  rng = np.random.default_rng(seed)
  old, ref, sampler, entropy, value, old_values, returns = rng.normal(size=(7, *shape))
  mask = rng.random(shape) > 0.3
  mask[1], mask[2] = False, np.arange(shape[1]) == 1
  fields = dict(sampler_logprobs=-1 + 0.1 * sampler, old_values=old_values, returns=returns)
  fields = fields if critic else {'sampler_logprobs': fields['sampler_logprobs']}
  group = make_group(mask, rng.normal(size=shape[0]), -1 + 0.1 * old, -1 + 0.3 * ref, **(fields | more))
  logprob = -1 + 0.2 * rng.normal(size=shape)
  return Scores(*map(jnp.asarray, (logprob, entropy)), jnp.asarray(value) if critic else None), group


# ---- golden values ----

GOLDEN = {  # TRL's name -> ours and its settings
    'grpo': ('grpo', {'normalize': 'sequence'}), 'bnpo': ('grpo', {}), 'dapo': ('dapo', {}),
    'dr_grpo': ('dr_grpo', {}), 'gspo': ('gspo', {}), 'cispo': ('cispo', {}),
    'grpo_klw': ('grpo', {'normalize': 'sequence', 'kl_weighted': True}),
    'bnpo_klw': ('grpo', {'kl_weighted': True}), 'gspo_klw': ('gspo', {'kl_weighted': True}),
    'dpo': ('dpo', {'preference_beta': 0.1}),
}


@pytest.mark.parametrize('case', ['dense_small', 'hybrid_small'])
@pytest.mark.parametrize('theirs', GOLDEN)
def test_losses_match_trl(case, theirs):
  data = dict(np.load(CASES / case / 'batch.npz'))
  logprobs = np.load(CASES / case / 'golden_logprobs.npz')['logprobs']
  rows = slice(2) if theirs == 'dpo' else slice(None)
  mask, advantages, old, ref = (data[k][rows].astype(float) for k in (
      'response_mask', 'advantages', 'old_logprobs', 'ref_logprobs'))
  name, settings = GOLDEN[theirs]
  config = ObjectiveConfig(**{'kl_coef': 0.04, **settings})
  loss, _, grads = run(name, config, logprobs[rows], make_group(mask, advantages, old, ref))
  want = json.loads((CASES / case / 'golden_trl.json').read_text())[theirs]['loss']
  np.testing.assert_allclose(loss, want, rtol=1e-9, atol=0)
  assert np.isfinite(grads.logprob).all()


def test_ppo_matches_tunix_with_derivatives():
  case = dict(np.load(CASES / 'dense_small' / 'golden_ppo.npz'))
  group = make_group(case['mask'], case['advantages_whitened'], case['old_logprobs'],
                     old_values=case['values'], returns=case['returns'])
  scores = Scores(*map(jnp.asarray, (case['logprobs'], 0 * case['mask'], case['vpred'])))
  config = ObjectiveConfig(clip_low=float(case['eps']), clip_high=float(case['eps']), value_coef=0.5,
                           value_clip=float(case['clip_value']))
  loss, metrics, grads = run('ppo', config, scores, group)
  close(metrics['policy_loss'], case['policy_loss'], 1e-9)
  close(metrics['value_loss'], case['value_loss'], 1e-9)
  close(loss, case['policy_loss'] + 0.5 * case['value_loss'], 1e-9)
  close(grads.logprob, case['policy_grad'], 1e-9)
  close(grads.value, 0.5 * case['value_grad'], 1e-9)
  assert metrics['clipped'] > 0 and metrics['value_clipped'] > 0


# ---- hand-worked numbers ----

MASK = [[1, 0, 0], [1, 1, 1]]
LOSSES = [[4, 9, 9], [1, 1, 1]]


@pytest.mark.parametrize('normalize, length, want', [
    ('token', 0, 1.75), ('sequence', 0, 2.5), ('fixed', 4, 0.875), ('fixed', 0, 7 / 6)])
def test_normalisation(normalize, length, want):  # edge case 13
  close(objectives.masked_mean(jnp.array(LOSSES, float), jnp.array(MASK, float), normalize, length), want)
  config = ObjectiveConfig(normalize=normalize, fixed_length=length)
  close(run('nll', config, -jnp.array(LOSSES, float), make_group(MASK))[0], want)
  if normalize == 'fixed':
    config = ObjectiveConfig(fixed_length=length)
    group = make_group(MASK, [-4.0, -1.0])  # at ratio 1 a token's loss is -A
    close(run('dr_grpo', config, LOSSES, group)[0], want)


def test_micro_batches_add_up():  # edge case 14
  halves = [(-jnp.array(LOSSES[i:i + 1], float), MASK[i:i + 1]) for i in range(2)]
  total = sum(run('nll', ObjectiveConfig(), x, make_group(m, denominator=4.0))[0] for x, m in halves)
  close(total, 1.75)
  mean = sum(run('nll', ObjectiveConfig(), x, make_group(m, denominator=2.0))[0] for x, m in halves) / 2
  close(mean, 1.75)  # the engine's mean of groups, with the batch's tokens per group


@pytest.mark.parametrize('name', ['grpo', 'dapo', 'cispo', 'ppo', 'nll'])
def test_a_batchs_token_mean_is_that_of_one_large_group(name):
  scores, group = random_case(seed=3)
  cut = lambda rows: jax.tree.map(lambda x: x[rows], vars(group))
  count = group.mask.sum()
  whole = run(name, EVERYTHING, scores, group)
  parts = [run(name, EVERYTHING, jax.tree.map(lambda x: x[rows], scores),
               SimpleNamespace(**cut(rows) | {'denominator': count})) for rows in (slice(0, 1), slice(1, 4))]
  close(parts[0][0] + parts[1][0], whole[0])
  close(np.concatenate([p[2].logprob for p in parts]), whole[2].logprob)
  close(np.concatenate([p[2].entropy for p in parts]), whole[2].entropy)


@pytest.mark.parametrize('kind, value, slope', [
    ('k1', np.log(2), 1), ('k2', np.log(2)**2 / 2, np.log(2)), ('k3', np.log(2) - 0.5, 0.5)])
def test_kl_estimates(kind, value, slope):  # edge case 15
  ones = jnp.ones((1, 1))
  estimate = lambda x: objectives.kl_estimate(x, np.log(0.25) * ones, ones, kind)[0, 0]
  got = jax.value_and_grad(estimate)(np.log(0.5) * ones)
  close(got[0], value)
  close(got[1], [[slope]])
  config = ObjectiveConfig(kl_coef=0.5, kl_kind=kind)
  loss, metrics, grads = run('grpo', config, [[np.log(0.5)]], make_group([[1]], ref=[[np.log(0.25)]]))
  close([loss, metrics['kl'], grads.logprob[0, 0]], [value / 2, value, slope / 2])
  weighted = dataclasses.replace(config, kl_weighted=True)  # d(rho kl) = rho (kl + slope), rho 1
  close(run('grpo', weighted, [[np.log(0.5)]], make_group([[1]], ref=[[np.log(0.25)]]))[2].logprob,
        [[(value + slope) / 2]])


def test_kl_in_the_reward_is_reported_and_leaves_the_loss():
  config = ObjectiveConfig(kl_coef=0.5, kl_in='reward')
  loss, metrics, grads = run('grpo', config, [[np.log(0.5)]], make_group([[1]], ref=[[np.log(0.25)]]))
  assert loss == 0 and not grads.logprob.any()
  close(metrics['kl'], np.log(2) - 0.5)


@pytest.mark.parametrize('advantage, log_rho, loss, slope, clipped', [
    (1, 0.1, -np.exp(0.1), -np.exp(0.1), 0), (1, 0.5, -1.2, 0, 1), (1, 0, -1, -1, 0),
    (1, -0.5, -np.exp(-0.5), -np.exp(-0.5), 0), (-1, -0.5, 0.8, 0, 1),
    (-1, 0.5, np.exp(0.5), np.exp(0.5), 0)])
def test_clipping(advantage, log_rho, loss, slope, clipped):
  got = run('grpo', ObjectiveConfig(), [[log_rho - 1]], make_group([[1]], [float(advantage)], [[-1.0]]))
  close([got[0], got[2].logprob[0, 0], got[1]['clipped'], got[1]['ratio']],
        [loss, slope, clipped, np.exp(log_rho)])


def test_dapo_clips_higher():
  group = make_group([[1]], [1.0], [[0.0]])
  loss, metrics, grads = run('dapo', objective_preset('dapo'), [[np.log(1.25)]], group)
  close([loss, grads.logprob[0, 0]], [-1.25, -1.25])
  close(run('dapo', objective_preset('dapo'), [[np.log(1.3)]], group)[0], -1.28)
  two = make_group(MASK, [-4.0, -1.0])  # the token mean whatever `normalize` says
  close(run('dapo', ObjectiveConfig(normalize='sequence'), LOSSES, two)[0], 1.75)


def test_reinforce_is_a_weighted_log_likelihood():
  logprobs, group = [[-1.0, -2, 5], [-3, 5, 5]], make_group([[1, 1, 0], [1, 0, 0]], [2.0, -1.0])
  loss, _, grads = run('rloo', objective_preset('rloo'), logprobs, group)
  close(loss, (2 * 3 - 3) / 2)  # mean over branches of -A log pi(branch)
  close(grads.logprob, [[-1, -1, 0], [0.5, 0, 0]])
  close(run('reinforce', ObjectiveConfig(), logprobs, group)[0], 1)


def test_gspo_by_hand():
  gaps = np.array([[0.2, 0.0, 9], [-0.1, -0.3, -0.2]])  # means 0.1, -0.2
  group = make_group([[1, 1, 0], [1, 1, 1]], [1.0, 2.0], np.zeros((2, 3)))
  loss, metrics, grads = run('gspo', ObjectiveConfig(), gaps, group)
  rho = np.exp([0.1, -0.2])
  close(loss, -(rho[0] + 2 * rho[1]) / 2)
  close(grads.logprob, [[-rho[0] / 4, -rho[0] / 4, 0], [-rho[1] / 3] * 3])  # -A rho / (G n)
  close(metrics['ratio'], (2 * rho[0] + 3 * rho[1]) / 5)
  assert not run('gspo', objective_preset('gspo'), gaps, group)[2].logprob[0].any()  # clipped at 1.0004
  no_old = make_group(group.mask, group.advantages)
  close(run('gspo', ObjectiveConfig(), gaps, no_old)[2].logprob, [[-1 / 4, -1 / 4, 0], [-1 / 3] * 3])


def test_cispo_caps_the_weight_and_keeps_the_gradient():
  logprobs = np.array([[-1.0, -0.5, -3.0]])
  loss, metrics, grads = run('cispo', ObjectiveConfig(), logprobs,
                             make_group([[1, 1, 1]], [2.0], np.full((1, 3), -1.0)))
  weight = np.array([[1, 1.2, np.exp(-2)]])
  close(loss, -(2 * weight * logprobs).mean())
  close(grads.logprob, -2 * weight / 3)
  close(metrics['clipped'], 1 / 3)


def test_entropy_bonus():
  scores = Scores(jnp.zeros((1, 2)), jnp.array([[0.5, 7.0]]))
  loss, metrics, grads = run('grpo', ObjectiveConfig(entropy_coef=0.1), scores, make_group([[1, 0]]))
  close([loss, metrics['entropy']], [-0.05, 0.5])
  close(grads.entropy, [[-0.1, 0]])


def test_importance_correction_is_truncated_and_reported():
  gap = np.array([[0.0, np.log(1.5), np.log(4.0), 50.0]])  # log trainer - log sampler
  group = make_group([[1, 1, 1, 0]], [1.0], sampler_logprobs=-1 - gap)
  loss, metrics, grads = run('grpo', ObjectiveConfig(), np.full((1, 4), -1.0), group)
  close(loss, -(1 + 1.5 + 2) / 3)
  close(grads.logprob, [[-1 / 3, -0.5, -2 / 3, 0]])
  close(metrics['sampler_gap'], (np.log(1.5) + np.log(4)) / 3)
  close(metrics['sampler_kl'], (0.5 - np.log(1.5) + 3 - np.log(4)) / 3)
  close(metrics['sampler_capped'], 1 / 3)
  loss, off, _ = run('grpo', ObjectiveConfig(importance_cap=0), np.full((1, 4), -1.0), group)
  close([loss, off['sampler_gap'], off['sampler_capped']], [-1, metrics['sampler_gap'], 0])
  old = make_group([[1, 1, 1, 0]], [1.0], np.full((1, 4), -1.0), sampler_logprobs=-1 - gap)
  loss, again, _ = run('grpo', ObjectiveConfig(), np.full((1, 4), -1.1), old)  # weights: old / sampler
  close(loss, -np.exp(-0.1) * (1 + 1.5 + 2) / 3)
  close(again['sampler_gap'], metrics['sampler_gap'])


def test_value_loss_by_hand():
  args = [jnp.array([x]) for x in ([1.0, 1.0, 0.5, np.nan], [0.0, 0.0, 0.4, 0.0], [0.0, 2.0, 0.5, np.nan])]
  mask = jnp.array([[1.0, 1, 1, 0]])
  value = lambda clip: jax.value_and_grad(objectives.clipped_value_loss, has_aux=True)(*args, mask, clip)
  (loss, share), slope = value(0.2)  # errors 1, max(1, 1.8^2), 0
  close([loss, share], [(1 + 1.8**2) / 6, 1 / 3])
  close(slope, [[1 / 3, 0, 0, 0]])
  (loss, share), slope = value(0.0)
  close([loss, share], [2 / 6, 0])
  close(slope, [[1 / 3, -1 / 3, 0, 0]])


def test_ppo_without_a_critic_is_grpo_and_half_a_critic_is_refused():
  scores, group = random_case(critic=False)
  close(run('ppo', EVERYTHING, scores, group)[0], run('grpo', EVERYTHING, scores, group)[0])
  with_values, with_returns = random_case()
  for s, g, missing in ((with_values, group, 'returns'), (scores, with_returns, 'values')):
    with pytest.raises(UserError, match=f'there are no {missing}'):
      run('ppo', EVERYTHING, s, g)


def test_ppo_without_old_values_does_not_clip_them():
  scores, group = random_case()
  group.old_values = None
  loss, metrics, grads = run('ppo', ObjectiveConfig(value_coef=1.0), scores, group)
  real = group.mask > 0
  close(metrics['value_loss'], ((scores.value - group.returns)[real]**2).mean() / 2)
  close(grads.value, np.where(real, scores.value - group.returns, 0) / real.sum())


@pytest.mark.parametrize('name, settings, want, chosen', [
    ('dpo', {'preference_beta': 0.5}, np.log1p(np.exp(-1)), -0.5 / (1 + np.e)),
    ('dpo', {'preference_beta': 0.5, 'label_smoothing': 0.25},
     0.75 * np.log1p(np.exp(-1)) + 0.25 * np.log1p(np.e), 0.5 * (0.25 - 1 / (1 + np.e))),
    ('dpo_norm', {'preference_beta': 2.0}, np.log1p(np.exp(-3)), -1 / (1 + np.exp(3))),
    ('ipo', {'preference_beta': 0.5}, 1, 2), ('ipo', {'preference_beta': 0.1}, 9, -6),
    ('simpo', {'preference_beta': 2.0, 'target_margin': 1.0}, np.log1p(np.exp(-2)), -1 / (1 + np.exp(2))),
])
def test_preferences_by_hand(name, settings, want, chosen):
  logprobs = [[-0.5, -1.5, 3.0], [-2.5, 3.0, 3.0]]  # log-ratios 0.5 + 0.5 and -1
  pair = make_group([[1, 1, 0], [1, 0, 0]], ref=[[-1.0, -2.0, 9], [-1.5, 9, 9]])
  loss, metrics, grads = run(name, ObjectiveConfig(**settings), logprobs, pair)
  rejected = -chosen * (2 if name in ('dpo_norm', 'simpo') else 1)  # means: 1 token against 2
  close(loss, want)
  close(grads.logprob, [[chosen, chosen, 0], [rejected, 0, 0]])
  margin = {'dpo': 2, 'ipo': 2, 'dpo_norm': 1.5, 'simpo': 1.5}[name]
  close([metrics['margin'], metrics['chosen'] - metrics['rejected']], margin)
  assert metrics['accuracy'] == 1


@pytest.mark.parametrize('name', PREFERENCE)
def test_pairs_do_not_mix_and_empty_pairs_do_not_count(name):
  scores, group = random_case(seed=1)
  group.mask = jnp.ones_like(group.mask)
  cut = lambda i: run(name, EVERYTHING, jax.tree.map(lambda x: x[2 * i:2 * i + 2], scores),
                      SimpleNamespace(**jax.tree.map(lambda x: x[2 * i:2 * i + 2], vars(group))))
  close(run(name, EVERYTHING, scores, group)[0], (cut(0)[0] + cut(1)[0]) / 2)
  group.mask = group.mask.at[2:].set(0)
  close(run(name, EVERYTHING, scores, group)[0], cut(0)[0])


@pytest.mark.parametrize('name', PREFERENCE)
def test_chosen_equal_to_rejected(name):  # edge case 19
  row = jnp.array([-1.0, -2.0, -0.5])
  group = make_group(np.ones((2, 3)), ref=np.full((2, 3), -0.7))
  config = ObjectiveConfig()
  loss = lambda row: run(name, config, jnp.stack([row, row]), group)[0]
  want = 25 if name == 'ipo' else np.log(2)
  close(loss(row), want)
  assert not jax.grad(loss)(row).any()
  cotangents = run(name, config, jnp.stack([row, row]), group)[2].logprob
  assert cotangents[0].all() and not (cotangents[0] + cotangents[1]).any()


# ---- edge cases ----

@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
@pytest.mark.parametrize('name', ['grpo', 'dapo', 'dr_grpo', 'gspo', 'cispo', 'ppo'])
def test_ratio_overflow_with_zero_advantage(name, dtype):  # edge case 16
  group = make_group([[1]], [0.0], [[-100.0]])
  group = SimpleNamespace(**jax.tree.map(lambda x: x.astype(dtype), vars(group)))
  zero = jnp.zeros((1, 1), dtype)
  loss, _, grads = run(name, ObjectiveConfig(), Scores(zero, zero), group)
  assert loss == 0 and loss.dtype == dtype and not grads.logprob.any()


@pytest.mark.parametrize('name', POLICY)
@pytest.mark.parametrize('old', ['none', 'same'])
def test_before_any_update(name, old):  # edge case 17
  scores, group = random_case(critic=False)
  group.old_logprobs = None if old == 'none' else scores.logprob
  _, metrics, _ = run(name, ObjectiveConfig(), scores, group)
  assert metrics['clipped'] == 0
  close(metrics['ratio'], 1)
  group.advantages = jnp.zeros(4)
  loss, _, grads = run(name, ObjectiveConfig(), scores, group)
  assert loss == 0 and not grads.logprob.any() and not grads.entropy.any()


@pytest.mark.parametrize('name', NAMES)
def test_gradients_are_zero_where_masked_whatever_stands_there(name):
  scores, group = random_case(seed=2)
  want = run(name, EVERYTHING, scores, group)
  real = group.mask > 0
  for junk in (np.nan, np.inf, -1e30):
    spoil = lambda x: jnp.where(real, x, junk) if getattr(x, 'shape', None) == real.shape else x
    fields = jax.tree.map(spoil, vars(group)) | {'mask': group.mask}
    got = run(name, EVERYTHING, jax.tree.map(spoil, scores), SimpleNamespace(**fields))
    assert got[0] == want[0]
    jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])
    for grad in jax.tree.leaves(got[2]):
      assert np.isfinite(grad).all() and not grad[~real].any()
  assert want[2].logprob[real].any()


@pytest.mark.parametrize('name', NAMES)
def test_all_tokens_masked(name):
  scores, group = random_case()
  group.mask = 0 * group.mask
  loss, metrics, grads = run(name, EVERYTHING, scores, group)
  assert loss == 0 and all(np.isfinite(x) for x in metrics.values())
  assert not any(x.any() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize('name', NAMES)
def test_empty_branches_add_nothing(name):  # edge case 3
  scores, group = random_case()
  assert np.array_equal(group.mask.sum(1) > 0, [True, False, True, True])
  changed = jax.tree.map(lambda x: x.at[1].add(3.0), scores)
  for a, b in zip(jax.tree.leaves(run(name, EVERYTHING, scores, group)),
                  jax.tree.leaves(run(name, EVERYTHING, changed, group))):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
@pytest.mark.parametrize('name, kind', [
    *[(name, 'k3') for name in NAMES], ('grpo', 'k1'), ('grpo', 'k2'), ('gspo', 'k1'), ('gspo', 'k2')])
def test_huge_log_ratios_stay_finite(name, kind, dtype):
  scores, group = random_case()
  cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
  for low, high in ((0.0, -3e4), (-3e4, 0.0)):
    group.old_logprobs = group.ref_logprobs = group.sampler_logprobs = jnp.full((4, 5), low)
    extreme = scores.replace(logprob=jnp.full((4, 5), high))
    config = dataclasses.replace(EVERYTHING, kl_kind=kind)
    got = run(name, config, cast(extreme), SimpleNamespace(**cast(vars(group))))
    assert all(np.isfinite(x).all() and x.dtype == dtype for x in jax.tree.leaves(got))


@pytest.mark.parametrize('name', POLICY)
def test_a_group_of_one(name):
  group = make_group([[1]], [0.0], ref=[[-1.0]])
  loss, metrics, grads = run(name, ObjectiveConfig(), [[-2.0]], group)
  assert loss == 0 and not grads.logprob.any() and all(np.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize('name', NAMES)
def test_separable_means_that_cotangents_do_not_couple(name):
  scores, group = random_case(seed=4, shape=(4, 3))
  group.mask = jnp.ones_like(group.mask)
  objective = make_objective(name, dataclasses.replace(EVERYTHING, clip_low=5.0, clip_high=5.0))
  assert objective.separable == (name not in COUPLED)
  slope = jax.grad(lambda s: objective.loss(s, group)[0])
  second = jax.jacfwd(lambda x: slope(scores.replace(logprob=x)).logprob)(scores.logprob).reshape(12, 12)
  assert (not np.any(second - np.diag(np.diag(second)))) == objective.separable


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('config', [
    EVERYTHING, dataclasses.replace(EVERYTHING, kl_weighted=False, kl_kind='k2')])
def test_gradients_match_finite_differences(name, config):
  scores, group = random_case(seed=5)
  loss = lambda s: make_objective(name, config).loss(s, group)[0]
  if name == 'cispo':  # its ratio is a constant: the gradient is that of the frozen weight's loss
    rho = jnp.minimum(jnp.exp(objectives.log_ratio(scores.logprob, group.old_logprobs, group.mask)), 1.2)
    frozen = SimpleNamespace(**(vars(group) | {'advantages': group.advantages[:, None] * rho}))
    loss = lambda s: make_objective('reinforce', config).loss(s, frozen)[0]
  grads = run(name, config, scores, group)[2]
  direction = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(6).normal(size=x.shape)), scores)
  move = lambda h: loss(jax.tree.map(lambda x, d: x + h * d, scores, direction))
  want = (8 * (move(1e-4) - move(-1e-4)) - (move(2e-4) - move(-2e-4))) / 12e-4
  got = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)))
  np.testing.assert_allclose(got, want, rtol=1e-8)


# ---- configuration ----

def test_mistakes_are_named():
  with pytest.raises(UserError, match="unknown objective 'grop'; use reinforce, rloo, grpo"):
    make_objective('grop', ObjectiveConfig())
  with pytest.raises(UserError, match='a group of 3 branches has a branch without a partner'):
    run('dpo', ObjectiveConfig(), np.zeros((3, 1)), make_group(np.ones((3, 1)), ref=np.zeros((3, 1))))
  for name in ('dpo', 'dpo_norm', 'ipo'):
    with pytest.raises(UserError, match='needs the log-probs of a reference policy'):
      run(name, ObjectiveConfig(), np.zeros((2, 1)), make_group(np.ones((2, 1))))
  with pytest.raises(UserError, match='kl_coef=0.1 needs the log-probs of a reference policy'):
    run('grpo', ObjectiveConfig(kl_coef=0.1), np.zeros((2, 1)), make_group(np.ones((2, 1))))


@pytest.mark.parametrize('config', [ObjectiveConfig(), EVERYTHING, *OBJECTIVE_PRESETS.values()])
def test_good_coefficients_pass(config):
  check_objective(config)


@pytest.mark.parametrize('name, value, sentence', [
    ('normalize', 'mean', "unknown normalize 'mean'; use token, sequence or fixed."),
    ('kl_kind', 'k4', "unknown kl_kind 'k4'; use k1, k2 or k3."),
    ('kl_in', 'state', "unknown kl_in 'state'; use loss or reward."),
    *[(name, -1, f'{name}=-1; it must not be negative.') for name in (
        'clip_low', 'clip_high', 'kl_coef', 'fixed_length', 'entropy_coef', 'importance_cap', 'value_coef',
        'value_clip', 'target_margin')],
    ('clip_low', float('nan'), 'clip_low=nan; it must not be negative.'),
    *[(name, 1.5, f'{name}=1.5; it must be from 0 to 1.') for name in ('gamma', 'lam')],
    *[(name, float('inf'), f'{name}=inf; it must be finite.') for name in (
        'kl_coef', 'entropy_coef', 'value_coef', 'preference_beta', 'target_margin')],
    ('preference_beta', 0.0, 'preference_beta=0.0; it must be more than 0.'),
    ('label_smoothing', 0.5, 'label_smoothing=0.5; it must be at least 0 and less than 0.5.'),
])
def test_a_bad_coefficient_is_named(name, value, sentence):
  with pytest.raises(UserError) as error:
    check_objective(ObjectiveConfig(**{name: value}))
  assert str(error.value) == sentence


def test_weighting_a_kl_term_that_is_not_there_is_refused():
  with pytest.raises(UserError, match='use kl_in=loss'):
    check_objective(ObjectiveConfig(kl_in='reward', kl_weighted=True))
