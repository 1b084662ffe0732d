"""Broken input files end in a result or in one sentence: a fixed budget of `bash launch.sh fuzz`, and what it found."""
import json

import pytest

from branchreplay import data, hf, rewards, tokenizer
from branchreplay.config import UserError
from experiments import fuzz


def test_a_fixed_budget(tmp_path):
  fuzz.make_files(tmp_path)
  found = [fuzz.case(tmp_path, number, seed=1) for number in range(1500)]
  assert {outcome for _, _, outcome in found} == {'result', 'refused'}, [f[::2] for f in found if f[2] not in ('result', 'refused')]
  assert {name for name, _, _ in found} == {*fuzz.READERS, 'reward', 'flags'}


def test_cases_are_a_function_of_seed_and_number(tmp_path):
  fuzz.make_files(tmp_path)
  assert [fuzz.case(tmp_path, n, 2) for n in range(20)] == [fuzz.case(tmp_path, n, 2) for n in range(20)]


def rewrite(file, **changes):
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize('change, sentence', [
    ({'num_hidden_layers': 10**400}, 'sensible size'), ({'num_hidden_layers': 10**7}, 'at most 10,000'),
    ({'vocab_size': 10**9}, 'at most 100,000,000'), ({'model_type': []}, 'is not supported'),
    ({'use_sliding_window': True, 'max_window_layers': 'x', 'layer_types': None}, 'max_window_layers')])
def test_shapes_of_no_sensible_size(tmp_path, change, sentence):
  fuzz.make_files(tmp_path)
  rewrite(tmp_path / 'config.json', **change)
  with pytest.raises(UserError, match=sentence):
    hf.read_config(tmp_path)


@pytest.mark.parametrize('bits', [0x01, 0x40])
def test_an_archive_that_says_it_is_encrypted(tmp_path, bits):
  fuzz.make_files(tmp_path)
  held = bytearray((tmp_path / 'batch.npz').read_bytes())
  for mark, at in ((b'PK\x03\x04', 6), (b'PK\x01\x02', 8)):  # the flags of a file's own header and of the directory's
    place = held.find(mark)
    while place >= 0:
      held[place + at] |= bits
      place = held.find(mark, place + 1)
  (tmp_path / 'batch.npz').write_bytes(held)
  with pytest.raises(UserError, match='batch.npz is no archive of plain arrays'):
    hf.batch_sizes(tmp_path)


def test_what_is_no_text_and_no_number(tmp_path):
  fuzz.make_files(tmp_path)
  (tmp_path / 'prompts.jsonl').write_text(json.dumps({'prompt': 'a', 'answer': '\ud800'}))
  with pytest.raises(UserError, match='line 1: a text holds half of a surrogate pair'):
    data.open_jsonl(tmp_path / 'prompts.jsonl', 'answer')
  with pytest.raises(UserError, match='no number of a sensible size'):
    rewards.evaluate(lambda *_: 10**400, 'p', 'r', 'a', 'line 1')
  rewrite(tmp_path / 'tokenizer_config.json', eos_token='\ud800', chat_template=[[]])
  assert tokenizer.load(tmp_path, 300).stop_token == -1
