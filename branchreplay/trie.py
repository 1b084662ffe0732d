"""Trajectories that share prefixes, merged into a tree of segments.

Agents branch at tool calls and turns: what trajectories share is a tree, not one
prefix. `make_tree` merges equal beginnings token by token (a trie), cuts every node
into segments and puts them into depth-first order; `tree.py` walks it. Masks,
advantages and old log-probs stay with the trajectories: a token that several share is
trained with the weight of all of them, because `index` sends each trajectory's token
to its one place in the tree.

Letters: n segments of T = segment_len positions, G trajectories, R branch_capacity.
"""
from typing import Any, NamedTuple

from flax import struct
import numpy as np

from branchreplay.batch import Group, check_tokens, make_group
from branchreplay.config import ModelConfig, ReplayConfig, UserError


@struct.dataclass
class Tree:
  """A tree of segments, or N stacked in front; segments are numbered in depth-first preorder."""
  tokens: Any  # i32 [n, T], inputs
  targets: Any  # i32 [n, T]
  length: Any  # i32 [n], valid positions
  start: Any  # i32 [n], position of a segment's first token
  path: Any  # i32 [n], how many segments stand above it
  level: Any  # i32 [n], how many nodes stand at or above its own, from 1
  first: Any  # bool [n], whether it is its node's first
  trained: Any  # bool [n], whether the objective counts a token of it
  count: Any  # i32 [], segments there are; the rest is padding
  order: Any  # i32 [n], in postorder: the order in which they are left
  enter: Any  # i32 [n], the segments from enter[i] up to order[i] are entered before order[i] is left
  index: Any  # i32 [G, R], place in [n, T], flat, of each trajectory's token; -1: none
  group: Group  # the trajectories' masks, advantages, ...; without their tokens
  levels: int = struct.field(pytree_node=False)  # most nodes on a path


class Node(NamedTuple):
  """Elements begin..end that `members`, numbers of trajectories, share."""
  parent: int  # number of the node above; -1: none
  begin: int
  end: int
  members: list


def merge(sequences, begin: int = 0) -> list[Node]:
  """Nodes of the trie over token arrays, in depth-first preorder.

  Element j of a sequence is its token j as the input and token j + 1 as the target. All
  sequences are taken to agree on the elements before `begin`.
  """
  nodes, todo = [], [(-1, 0, list(range(len(sequences))))]
  while todo:
    parent, start, members = todo.pop()
    end = max(start, min(len(sequences[m]) for m in members) - 1)
    known = max(start, begin)
    for m in members[1:]:
      unequal = np.flatnonzero(sequences[m][known:end + 1] != sequences[members[0]][known:end + 1])
      if unequal.size:  # token j is the target of element j - 1
        end = max(start, known + int(unequal[0]) - 1)
    if end > start:
      nodes.append(Node(parent, start, end, members))
      parent = len(nodes) - 1
    children = {}
    for m in members:
      if len(sequences[m]) - 1 > end:
        children.setdefault(tuple(sequences[m][end:end + 2].tolist()), []).append(m)
    todo += [(parent, end, below) for below in reversed(children.values())]
  return nodes


class Row(NamedTuple):
  """A segment: elements begin..end of a node; see `Tree`."""
  node: int
  begin: int
  end: int
  path: int
  level: int
  first: bool
  last: bool


def cut(nodes: list[Node], size: int) -> list[Row]:
  """The nodes' segments of up to `size` elements, in the nodes' order."""
  rows, below = [], []  # below: (path, level) of what hangs on each node
  for i, node in enumerate(nodes):
    path, level = below[node.parent] if node.parent >= 0 else (0, 1)
    for begin in range(node.begin, node.end, size):
      end = min(begin + size, node.end)
      rows.append(Row(i, begin, end, path, level, begin == node.begin, end == node.end))
      path += 1
    below.append((path, level + 1))
  return rows


def depth_first(rows: list[Row], inner: set) -> tuple[list, list]:
  """order, enter of a tree's rows, of which nodes `inner` have children; see `Tree`."""
  order, enter, entered, entered_to = [], [], [], 0
  for r, row in enumerate(rows):
    while entered and rows[entered[-1]].path >= row.path:
      order.append(entered.pop())
      enter.append(order[-1])  # nothing is entered before an inner segment is left
    if row.last and row.node not in inner:  # the end of a path is left at once
      order.append(r)
      enter.append(entered_to)
      entered_to = r + 1
    else:
      entered.append(r)
  order += reversed(entered)
  return order, enter + order[len(enter):]


def make_tree(model: ModelConfig, replay: ReplayConfig, prompt, responses, *, segments: int = 0, levels: int = 0,
              **others) -> Tree:
  """One tree of numpy arrays from the trajectories prompt + response; arguments as for `batch.make_group`.

  The longest path has to fit replay.prefix_capacity, whole segments for each of its nodes.
  Matrices are those of `make_group`: a column for each token of a response.
  segments, levels: pad to so many, so that trees of other shapes share a compilation.

  Raises UserError where the tree exceeds a capacity, and for all that make_group does.
  """
  prompt, size = np.asarray(prompt, np.int32), replay.segment_len
  group = make_group(model, replay, prompt[-1:], responses, **others)
  check_tokens(model, prompt, 'the prompt')
  begin = max(prompt.size - 1, 0)
  sequences = [np.concatenate([prompt, np.asarray(r, np.int32)]) for r in responses]
  nodes = merge(sequences, begin)
  rows = cut(nodes, size)
  count, longest = len(rows), max((row.path + 1 for row in rows), default=0)
  deepest = max((row.level for row in rows), default=1)
  if longest > replay.prefix_segments:
    raise UserError(f'the longest trajectory fills {longest} segments of {size} positions, the capacity is '
                    f'{replay.prefix_segments}; raise --prefix_capacity to {longest * size}.')
  for name, have, given in (('segments', count, segments), ('levels', deepest, levels)):
    if given and have > given:
      raise UserError(f'the tree has {have} {name}, the capacity is {given}; raise {name} to {have}.')

  n = max(segments, count, 1)
  tokens, targets = np.zeros((2, n, size), np.int32)
  index = np.full(group.mask.shape, -1, np.int32)
  for r, row in enumerate(rows):
    members = nodes[row.node].members
    sequence = sequences[members[0]]
    tokens[r, :row.end - row.begin] = sequence[row.begin:row.end]
    targets[r, :row.end - row.begin] = sequence[row.begin + 1:row.end + 1]
    elements = np.arange(max(row.begin, begin), row.end)
    index[np.array(members)[:, None], elements - begin] = r * size + elements - row.begin
  trained = np.zeros(n * size, bool)
  trained[index[(group.mask != 0) & (index >= 0)]] = True
  pad = lambda values: np.append(np.array(values, np.int32), np.zeros(n - count, np.int32))
  order, enter = depth_first(rows, {node.parent for node in nodes})
  return Tree(
      tokens, targets, pad([row.end - row.begin for row in rows]), pad([row.begin for row in rows]),
      pad([row.path for row in rows]), pad([row.level for row in rows]), pad([row.first for row in rows]).astype(bool),
      trained.reshape(n, size).any(1), np.int32(count), pad(order), pad(enter), index,
      group.replace(prefix=None, prefix_length=np.int32(begin), inputs=None, targets=None), max(levels, deepest))
