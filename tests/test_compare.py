"""compare.py: our own variants run as peers, mistakes of the user, and a peer that fails."""
import json
import sys

import numpy as np
import pytest

from branchreplay.config import UserError
from experiments import compare
from tests.test_scripts import rows_of

TINY = ['--model=tiny-dense', '--prefix_len=40', '--branches=3', '--branch_len=8', '--rounds=2', '--segment_len=16']


@pytest.mark.slow
def test_variants_of_ours(tmp_path, capsys):
  """Full sequences as a peer: the same gradient from another process."""
  out = tmp_path / 'rows.jsonl'
  rows = rows_of(compare, capsys, *TINY, '--peers=full_sequence,detached', f'--out={out}')
  assert rows == [json.loads(line) for line in open(out)]
  ours, full, detached = rows
  assert [row['peer'] for row in rows] == ['ours', 'full_sequence', 'detached']
  assert ours['rel_l2'] == 0 and full['rel_l2'] < 1e-5 and detached['rel_l2'] > 0.01
  np.testing.assert_allclose([full['loss'], detached['loss']], ours['loss'], rtol=1e-5)
  for row in rows:
    assert len(row['all_s']) == 2 and row['seconds'] == np.median(row['all_s']) and row['peak_mib'] >= row['before_mib'] > 0
    assert row['prefix_len'] == 40 and row['branches'] == 3 and row['dials']['devices'] == 2
  assert full['over_ours'] == full['seconds'] / ours['seconds']


def test_mistakes(tmp_path, capsys):
  for flags, sentence in ((['--peers=trlx'], "unknown peer 'trlx'; there are detached"), (['--rounds=0'], 'must be at least 1'),
                          (['--prefix_len=1k'], 'give whole numbers'), ([f'--case={tmp_path}'], 'config.json'),
                          (['--peers=hf', f'--torch_venv={tmp_path}'], 'there is no environment with bin/python'),
                          (['--model=small'], 'unknown model'), (['--keep=all'], "ours cannot run this case: unknown keep 'all'")):
    with pytest.raises(SystemExit) as ended:
      rows_of(compare, capsys, *TINY, '--peers=', *flags)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_a_peer_that_fails_says_why():
  code = 'import sys; print("it said much before"); sys.exit("no such layer.")'
  with pytest.raises(UserError, match=r'^mine cannot run this case: no such layer\.$'):
    compare.Peer('mine', [sys.executable, '-c', code], 1)
  with pytest.raises(UserError, match='^mine cannot run this case: it ended with status -9$'):
    compare.Peer('mine', [sys.executable, '-c', 'import os; os.kill(os.getpid(), 9)'], 1)


def test_distance_counts_what_one_lacks():
  a, b = {'x': np.array([3.0, 0.0])}, {'x': np.array([3.0, 0.0]), 'y': np.array([[4.0]])}
  assert compare.distance(a, a) == 0 and compare.distance(a, b) == 4 / 5 and compare.distance(b, a) == 4 / 3
