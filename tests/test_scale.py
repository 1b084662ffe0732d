"""Arrays past 2^31 elements, whose flat index no int32 holds: by the program's own operations, and run once."""
import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from branchreplay import attention, mesh, model, objectives, stream
from branchreplay.config import ObjectiveConfig
from experiments import fit

BIG = 2**31
# What keeps one index a dimension, or passes the array on. Whatever flattens, sorts, gathers or scatters is not here.
SAFE = {'dynamic_slice', 'dynamic_update_slice', 'broadcast_in_dim', 'squeeze', 'while', 'scan', 'cond', 'jit', 'shard_map'}


def operations(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jaxprs_in_params(eqn.params):
      yield from operations(inner)


@pytest.mark.parametrize('offload', [False, True])
def test_no_flat_index_into_arrays_past_2_to_the_31(offload):
  """Qwen3.6-27B's shape at 8,388,608 positions: 1.7e10 elements of keys a device. Traced, not compiled."""
  shape, replay = fit.configurations(fit.Fit(prefix_len=2**23, offload=offload), 8)
  mesh_ = AbstractMesh((1, 8), (mesh.DATA, mesh.SEQ))
  group = fit.abstract_group(shape, replay, 2, 1024)
  steps = stream.make_steps(mesh_, shape, replay, objectives.make_objective('grpo', ObjectiveConfig()), group)
  shapes = stream.shapes_of(mesh_, replay, steps, model.shapes(shape, 'bfloat16'), group)
  sizes = lambda values: [v.aval.size for v in values if hasattr(v.aval, 'size')]
  for name, arguments in stream.ARGUMENTS.items():
    for eqn in operations(getattr(steps, name).trace(*[shapes[a] for a in arguments]).jaxpr.jaxpr):
      values = (*eqn.invars, *eqn.outvars)
      assert all(n < BIG for v in values for n in getattr(v.aval, 'shape', ())), 'an index of one dimension has to fit'
      if max(sizes(values), default=0) >= BIG:
        assert eqn.primitive.name in SAFE, f'{name}: {eqn.primitive.name}'
        if eqn.primitive.name == 'squeeze':
          assert all(eqn.invars[0].aval.shape[d] == 1 for d in eqn.params['dimensions'])
        if name == 'pull' and eqn.primitive.name == 'dynamic_slice':
          assert eqn.outvars[0].aval.shape[0] == 1, 'the pull reads one layer, or one segment of a history, at a time'
  assert max(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64) for x in jax.tree.leaves(shapes['captured'])) > BIG


@pytest.mark.slow
def test_keys_past_2_to_the_31_elements():
  """The last keys of 2^26 + 2^16 slots of 32 numbers (4.3 GB): attention sees them, and adds to their cotangents."""
  block, dim = 2**16, 32
  slots = 2**26 + block
  rng = np.random.default_rng(0)
  tail, q = (jnp.asarray(rng.normal(size=(1, 1, n, dim)), jnp.bfloat16) for n in (block, 8))
  put = jax.jit(lambda keys, tail: attention._add_block(keys, tail[0, 0], 0, 0, slots - block), donate_argnums=0)
  keys = put(jnp.zeros((1, 1, slots, dim), jnp.bfloat16), tail)
  assert keys.size > BIG and np.array_equal(keys[:, :, -block:], tail) and not keys[:, :, :block].any()

  def seen(keys, first):
    position = jnp.arange(first, slots, dtype=jnp.int32)
    last = jnp.full(8, slots - 1, jnp.int32)
    rows = attention.Rows(last, last, jnp.zeros_like(last), 1000, 8)
    return attention.divided(*attention.forward(q[0], rows, (attention.key_range(rows, keys, keys, position, None, 0, block),)))

  got, want = jax.jit(seen, static_argnums=1)(keys, 0), jax.jit(seen, static_argnums=1)(tail, slots - block)
  for a, b in zip(got, want):
    np.testing.assert_array_equal(a, b)
    assert np.abs(np.asarray(a)).max() > 0.01
