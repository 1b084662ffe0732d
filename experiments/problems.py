"""Random groups of given sizes, for the scripts that measure rather than train."""
import numpy as np

from branchreplay import batch


def lengths(branches: int, branch_len: int, ragged: bool, rng) -> list[int]:
  """Branch lengths: all branch_len, or ragged with an empty one and one of a single token."""
  if not ragged:
    return [branch_len] * branches
  fixed = [branch_len, 0, 1][:branches]
  return fixed + [int(n) for n in rng.integers(0, branch_len + 1, branches - len(fixed))]


def random_group(model, replay, prefix_len: int, branches: int, branch_len: int, dtype, seed: int = 0,
                 ragged: bool = False, kl: bool = True) -> batch.Group:
  """One group, stacked: random tokens, advantages, and log-probs near a random model's."""
  rng = np.random.default_rng(seed)
  sizes = lengths(branches, branch_len, ragged, rng)
  near = -np.log(model.vocab_size)
  rows = lambda draw: [draw(n) for n in sizes]
  tokens = lambda n: rng.integers(0, model.vocab_size, n)
  logprobs = lambda n: near + 0.3 * rng.normal(size=n)
  group = batch.make_group(model, replay, tokens(prefix_len), rows(tokens), advantages=rng.normal(size=branches),
                           old_logprobs=rows(logprobs) if kl else None,
                           ref_logprobs=rows(logprobs) if kl else None, dtype=dtype)
  return batch.stack([group])
