"""The device mesh, the one sharding table, and the collectives by name.

Axes: `data` holds different groups, `seq` splits the positions of every segment
(and the heads of recurrent layers). Everything below runs inside `shard_map`
with `check_vma=False`, where `psum` transposes to `psum`: sums over devices
stand only outside differentiated code; `gather`, `scatter_sum` and `exchange`
transpose rightly.
"""
import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from branchreplay.config import UserError

DATA, SEQ = 'data', 'seq'

# Parameter group -> the axis that is split over `seq` when parameters are
# sharded. Leaves of `blocks` are stacked over repeats first. Others are whole.
SPLIT_AXIS = {'embed': 0, 'head': 0, 'blocks': 1}


def make_mesh(data: int = 1, seq: int | None = None) -> Mesh:
  """Mesh of data x seq devices; seq=None takes all there are. UserError if too few."""
  devices = jax.devices()
  if data < 1 or (seq is not None and seq < 1):
    raise UserError(f'a mesh of data={data} x seq={seq} devices is empty; use at least 1 of each.')
  seq = seq or max(1, len(devices) // data)
  if data * seq > len(devices):
    raise UserError(
        f'{data * seq} devices asked for (data={data} x seq={seq}), {len(devices)} available; '
        f'ask for fewer, or on a CPU for virtual ones with --virtual_devices={data * seq}.')
  if jax.process_count() > 1 and data * seq < len(devices):
    raise UserError(f'{jax.process_count()} processes hold {len(devices)} devices and all take part, but data={data} x '
                    f'seq={seq} are {data * seq}; change either.')
  return Mesh(np.array(devices[:data * seq]).reshape(data, seq), (DATA, SEQ))


def split_tree(shapes, seq: int, shard: bool):
  """Tree of bools: which leaves of the parameters `shapes` are split over `seq`."""
  def split(path, leaf):
    axis = SPLIT_AXIS.get(path[0].name)
    return bool(shard and axis is not None and leaf.shape[axis] % seq == 0)
  return jax.tree_util.tree_map_with_path(split, shapes)


def parameter_specs(shapes, seq: int, shard: bool):
  """PartitionSpecs of the parameters (and of their gradients and optimizer moments)."""
  def spec(path, split):
    return P(*[None] * SPLIT_AXIS[path[0].name], SEQ) if split else P()
  return jax.tree_util.tree_map_with_path(spec, split_tree(shapes, seq, shard))


def shardings(mesh: Mesh, specs):
  """NamedShardings for a tree of PartitionSpecs."""
  return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def abstract(mesh: Mesh, specs, tree):
  """ShapeDtypeStructs of `tree`, sharded by PartitionSpecs of which one may stand for a whole subtree."""
  lay = lambda spec, part: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), part)
  return jax.tree.map(lay, specs, tree, is_leaf=lambda s: isinstance(s, P))


def laid_out(x, *axes: int):
  """x, any array, whose `axes` (all of them, major to minor) lie in this order in a TPU's memory; elsewhere as the compiler likes.

  What a loop reads is otherwise copied, before the loop and as a whole, to the order that its readers like.
  """
  in_order = lambda x: layout.with_layout_constraint(x, layout.Layout(axes))
  return lax.platform_dependent(x, tpu=in_order, default=lambda x: x)


def to_host(tree):
  """`tree` in the host's memory, inside a compiled function: loops slice and update it there."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def zeros(shape, dtype, host: bool = False):
  """Zeros, in the host's memory if asked: there they pass through no device."""
  return lax.broadcast_in_dim(to_host(jnp.zeros((), dtype)), shape, ()) if host else jnp.zeros(shape, dtype)


def to_device(tree):
  """`tree` back in the device's memory."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree)


def seq_size() -> int:
  return lax.axis_size(SEQ)


def seq_index():
  return lax.axis_index(SEQ)


def gather(x, axis: int):
  """Concatenates the devices' slices along `axis`; transposes to `scatter_sum`."""
  return lax.all_gather(x, SEQ, axis=axis, tiled=True)


def scatter_sum(x, axis: int):
  """Sums over devices and keeps this device's slice of `axis`."""
  return lax.psum_scatter(x, SEQ, scatter_dimension=axis, tiled=True)


def exchange(x, split: int, concat: int):
  """All-to-all: splits axis `split` over devices, concatenates along `concat`."""
  return lax.all_to_all(x, SEQ, split, concat, tiled=True)


def max_over(x):
  return lax.pmax(x, SEQ)


def sum_over(x):
  return lax.psum(x, SEQ)


def sum_over_tree(tree, axes=SEQ):
  """Sum of each leaf over devices, as one collective a dtype.

  One, because independent collectives of eight virtual devices can block all the
  threads of a small CPU's pool, each waiting for another.
  """
  leaves, treedef = jax.tree.flatten(tree)
  out = list(leaves)
  for dtype in sorted({x.dtype.name for x in leaves}):
    at = [i for i, x in enumerate(leaves) if x.dtype.name == dtype]
    flat = lax.psum(jnp.concatenate([leaves[i].reshape(-1) for i in at]), axes)
    parts = jnp.split(flat, np.cumsum([leaves[i].size for i in at])[:-1])
    for i, part in zip(at, parts):
      out[i] = part.reshape(leaves[i].shape)
  return treedef.unflatten(out)


def own(x, axis: int):
  """This device's slice of `axis` of a replicated array."""
  size = x.shape[axis] // seq_size()
  return lax.dynamic_slice_in_dim(x, seq_index() * size, size, axis)


def gather_tree(tree, split):
  """Gathers the split leaves of one layer's weights (their first axis)."""
  return jax.tree.map(lambda x, s: gather(x, 0) if s else x, tree, split)


def reduce_gradients(grads, split):
  """Sums each device's partial gradients: whole leaves over seq, all over data."""
  whole, parts = (jax.tree.map(lambda s, g: g if s == keep else None, split, grads) for keep in (False, True))
  whole = sum_over_tree(whole, (DATA, SEQ))
  if jax.tree.leaves(parts):
    parts = jax.tree.map(lambda g: lax.psum(g, DATA), parts)  # shards: too large to copy into one array
  pick = lambda w, p: p if w is None else w
  return jax.tree.map(pick, whole, parts, is_leaf=lambda x: x is None)


def sharded(mesh: Mesh, function, in_specs, out_specs, **jit_options):
  """jit(shard_map(function)); every call goes through here, so that all agree."""
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
                               check_vma=False), **jit_options)
