"""Block-diffusion branches: masked inputs, attention in both directions inside a block."""
import dataclasses

import numpy as np
import pytest

from branchreplay import batch
from branchreplay.checks import check_replay
from branchreplay.config import UserError
from branchreplay.full_sequence import block_sight
from tests.engine import REPLAY, SMALL, distance, gradient

BLOCK = 4
MIXED = dataclasses.replace(SMALL, pattern=('deltanet', 'window', 'full'), window=23)
MASK_TOKEN = 39


def make(shape, prompt_len, sizes, seed=0):
  """A stacked group of noised responses: about half of their tokens are masked, and predicted."""
  rng = np.random.default_rng(seed)
  targets = [rng.integers(0, shape.vocab_size - 1, n) for n in sizes]
  masks = [rng.random(n) < 0.5 for n in sizes]
  inputs = [np.where(m, MASK_TOKEN, t) for m, t in zip(masks, targets)]
  replay = dataclasses.replace(REPLAY, block_len=BLOCK)
  return batch.stack([batch.make_masked_group(shape, replay, rng.integers(0, shape.vocab_size, prompt_len), inputs,
                                              targets, masks, dtype=np.float64)])


def gradients_of(shape, group, devices, full_sequence=False, **changes):
  return gradient(shape, group, devices, full_sequence, name='nll', block_len=BLOCK, **changes)


def test_exact_equals_full_sequences():
  """Any number of blocks, a last one that is not full, empty branches; window and recurrent layers too."""
  group = make(MIXED, 77, [20, 0, 1, 9, 6])
  got, want = gradients_of(MIXED, group, 2), gradients_of(MIXED, group, 1, full_sequence=True)
  assert distance(got, want) <= 1e-10
  np.testing.assert_allclose(got.loss, want.loss, rtol=1e-12)


def test_a_block_sees_itself_and_what_is_before():
  shape = dataclasses.replace(SMALL, pattern=('full',))
  group = make(shape, 20, [12])
  at = np.array(group.inputs)
  def logprobs(position):
    changed = at.copy()
    changed[0, 0, position] = (at[0, 0, position] + 1) % 30
    return np.asarray(gradients_of(shape, group.replace(inputs=changed), 1).scores.logprob)[0, 0, :12]
  base = np.asarray(gradients_of(shape, group, 1).scores.logprob)[0, 0, :12]
  differs = lambda position: np.flatnonzero(logprobs(position) != base)
  assert list(differs(6)) == list(range(4, 12))  # block 1 and those behind it
  assert list(differs(11)) == list(range(8, 12))


def test_sight_by_hand():
  # three prompt positions, then blocks of two; the branch has three tokens
  np.testing.assert_array_equal(block_sight(np.arange(7), 3, 3, 2), [0, 1, 2, 4, 4, 5, 6])


def test_the_state_covers_the_whole_prompt():
  group = batch.make_masked_group(SMALL, REPLAY, [5, 6, 7], [[39, 9]], [[8, 9]], [[1, 0]])
  assert group.prefix_length == 3 and list(group.prefix[0, :4]) == [5, 6, 7, 0]
  assert list(group.inputs[0, :3]) == [39, 9, 0] and list(group.targets[0, :3]) == [8, 9, 0]
  assert list(group.mask[0, :3]) == [1, 0, 0] and group.length[0] == 2


def test_mistakes():
  with pytest.raises(UserError, match='1 inputs and 2 targets'):
    batch.make_masked_group(SMALL, REPLAY, [5], [[39]], [[8, 9]], [[1, 0]])
  with pytest.raises(UserError, match='token id 99'):
    batch.make_masked_group(SMALL, REPLAY, [5], [[39, 99]], [[8, 9]], [[1, 0]])
  with pytest.raises(UserError, match='block_len=3 does not divide branch_segment_len=8'):
    check_replay(dataclasses.replace(REPLAY, block_len=3), 1, 2)
