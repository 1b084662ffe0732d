"""The obvious reference: plain autodiff on each full sequence (prefix and branch).

What usual trainers do: every branch pays the prefix again; layers are
rematerialised; one branch at a time on each device, branches spread over the
devices of `seq`. Same signature as `gradients.group_gradient`. Shares the local
pieces of a layer with the engine, and none of its capture, replay or pullback.
"""
import jax
from jax import lax
import jax.numpy as jnp

from branchreplay import lora, mesh, rope
from branchreplay import model as layers
from branchreplay.attention import at_least_f32
from branchreplay.batch import Scores
from branchreplay.deltanet import causal_conv, delta_rule
from branchreplay.head import values
from branchreplay.model import Params

QUERY_BLOCK = 1024


def plain_attention(q, k, v, window=None, sight=None):
  """Softmax attention, q [S, H, h] (scaled), k and v [S, K, h] -> [S, H, h].

  sight i32 [S]: the last position each position sees; None: its own (causal), where a block
  of queries at a time goes against the keys up to its end, so that masked pairs cost nothing.
  """
  length, kv_heads, dim = k.shape
  group = q.shape[1] // kv_heads
  q = jnp.moveaxis(q.reshape(length, kv_heads, group, dim), 1, 0)
  k, v = jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)

  def block(start, end):
    low = 0 if window is None else max(0, start - window + 1)
    high = end if sight is None else length
    rows, keys = jnp.repeat(jnp.arange(start, end), group)[:, None], jnp.arange(low, high)
    visible = keys <= (rows if sight is None else sight[rows])
    if window is not None:
      visible &= keys > rows - window
    def head(x):
      q, k, v = x
      a = lax.dot(q, k.T, preferred_element_type=at_least_f32(q.dtype))
      return jax.nn.softmax(jnp.where(visible, a, -jnp.inf)).astype(v.dtype) @ v
    return lax.map(head, (q[:, start:end].reshape(kv_heads, -1, dim), k[:, low:high], v[:, low:high]))

  blocks = [jax.checkpoint(block, static_argnums=(0, 1))(s, min(s + QUERY_BLOCK, length))
            for s in range(0, length, QUERY_BLOCK)]
  o = jnp.concatenate(blocks, 1).reshape(kv_heads, length, group, dim)
  return jnp.moveaxis(o, 0, 1).reshape(length, kv_heads * group, dim)


def _attention_layer(model, kind, block, h, tables, sight=None):
  (q, k, v, gate), _ = layers.attention_in(model, block, h, tables)
  o = plain_attention(q, k, v, model.window if kind == 'window' else None, sight)
  return layers.attention_out(model, block, h, o, gate)[0]


def _delta_layer(model, block, h):
  m, p, length = model, block.mixer, h.shape[0]
  (q, k, v, beta, decay, z), _ = layers.delta_in(m, block, h)
  flat = jnp.concatenate([x.reshape(length, -1) for x in (q, k, v)], -1)
  tail = jnp.zeros((1, m.conv_width - 1, flat.shape[-1]), h.dtype)
  mixed = causal_conv(flat[None], tail, p.conv, jnp.array([length]))[0][0]
  keys = m.delta_key_heads * m.delta_key_dim
  group = m.delta_value_heads // m.delta_key_heads
  q, k = (jnp.repeat(x.reshape(length, m.delta_key_heads, -1), group, 1)
          for x in (mixed[:, :keys], mixed[:, keys:2 * keys]))
  g, b = layers.delta_gates(beta, decay, p.a_log, p.dt_bias, True)
  state = jnp.zeros((m.delta_value_heads, m.delta_key_dim, m.delta_value_dim), g.dtype)
  o, _ = delta_rule(q, k, mixed[:, 2 * keys:].reshape(v.shape), g, b, state, m.chunk)
  return layers.delta_out(m, block, h, o, z)[0]


def hidden(model, params: Params, tokens, sight=None):
  """Last layer's output [S, D] of tokens i32 [S] at positions 0..S-1; sight: see `plain_attention`."""
  tables = rope.tables_of(model, jnp.arange(tokens.size), at_least_f32(params.embed.dtype))

  def repeat(h, blocks):
    for block, kind in zip(blocks, model.pattern):
      if kind == 'deltanet':
        h = jax.checkpoint(_delta_layer, static_argnums=0)(model, block, h)
      else:
        h = jax.checkpoint(_attention_layer, static_argnums=(0, 1))(model, kind, block, h, tables, sight)
    return h, None

  return lax.scan(repeat, params.embed[tokens], params.blocks)[0]


def block_sight(positions, prefix_length, branch_length, block: int):
  """The last position that each of i32 [S] sees: its own in the prefix, its block's last real one in the branch."""
  ends = prefix_length + ((positions - prefix_length) // block + 1) * block - 1
  ends = jnp.minimum(ends, prefix_length + branch_length - 1)
  return jnp.where(positions < prefix_length, positions, jnp.maximum(ends, positions))


def branch_scores(model, params: Params, prefix, length, inputs, targets, branch_length=0, block: int = 1) -> Scores:
  """Scores [R] of one branch: prefix i32 [n*T] of which `length` are real, inputs [R].

  block: of how many branch tokens each sees all (block diffusion), up to `branch_length`; 1: causal.
  """
  tokens = jnp.concatenate([prefix, jnp.zeros_like(inputs)])
  tokens = lax.dynamic_update_slice_in_dim(tokens, inputs, length, 0)
  sight = block_sight(jnp.arange(tokens.size), length, branch_length, block) if block > 1 else None
  h = lax.dynamic_slice_in_dim(hidden(model, params, tokens, sight), length, inputs.size)
  x = layers.rms_norm(h, params.norm, model.norm_offset, model.norm_eps)
  logits = (x @ layers.head_table(params).T).astype(at_least_f32(h.dtype))
  logprobs = jax.nn.log_softmax(logits)
  return Scores(jnp.take_along_axis(logprobs, targets[:, None], 1)[:, 0],
                -(jnp.exp(logprobs) * logprobs).sum(-1), values(params, x))


def full_sequence_gradient(model, replay, objective, params: Params, split: Params, group, grads: Params,
                           weight=1.0, captured=None):
  """Loss, scores and gradient of one group by plain autodiff; see `group_gradient`."""
  del captured
  full = mesh.gather_tree(
      params, split.replace(blocks=jax.tree.map(lambda _: False, split.blocks)))
  full = full.replace(blocks=jax.tree.map(
      lambda x, s: mesh.gather(x, 1) if s else x, params.blocks, split.blocks))
  prefix = mesh.gather(group.prefix, 1).reshape(-1)
  seq, index = mesh.seq_size(), mesh.seq_index()
  branches = group.inputs.shape[0]
  mine = (branches - index + seq - 1) // seq  # branches index, index + seq, ...
  free = lora.trainable(model, full)
  one = lambda p, g: branch_scores(model, lora.join(p, full), prefix, group.prefix_length, group.inputs[g], group.targets[g],
                                   group.length[g], replay.block_len)
  put = lambda matrices, rows, g: jax.tree.map(lambda m, r: m.at[g].set(r), matrices, rows)
  matrix = jnp.zeros(group.inputs.shape, at_least_f32(params.embed.dtype))
  zeros = lambda: Scores(matrix, matrix, None if params.value is None else matrix)
  cotangents = jax.grad(lambda s: objective.loss(s, group)[0] * weight)

  dscores = None
  if not objective.separable:
    step = lambda j, s: put(s, one(free, index + j * seq), index + j * seq)
    dscores = cotangents(mesh.sum_over_tree(lax.fori_loop(0, mine, step, zeros())))

  def step(j, carry):
    total, scores = carry
    g = index + j * seq
    row, pull = jax.vjp(lambda p: one(p, g), free)
    scores = put(scores, row, g)
    d = cotangents(put(zeros(), row, g)) if dscores is None else dscores
    update, = pull(jax.tree.map(lambda x: x[g], d))
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, update), scores

  total = jax.tree.map(lambda p, g: jnp.zeros(p.shape, g.dtype), free, grads)
  total, scores = lax.fori_loop(0, mine, step, (total, zeros()))
  scores = mesh.sum_over_tree(scores)
  axis = lambda path: mesh.SPLIT_AXIS[path[0].name]
  mine_of = lambda path, s, g, t: None if g is None else g + (mesh.scatter_sum(t, axis(path)) if s else t)
  grads = jax.tree_util.tree_map_with_path(mine_of, split, grads, total)
  loss, metrics = objective.loss(scores, group)
  return loss, metrics, scores, grads
