"""Hugging Face checkpoints in and out: config.json, safetensors, tokenizer files.

  config.py    config.json <-> ModelConfig
  names.py     which tensor holds which leaf of `Params`, and how their layouts differ
  reading.py   safetensors -> sharded parameters, tensor by tensor
  writing.py   parameters and gradients -> safetensors
  case.py      a group of branches from a batch.npz
"""
from branchreplay.hf.case import batch_sizes, read_batch, response_tokens
from branchreplay.hf.config import read_config
from branchreplay.hf.reading import load
from branchreplay.hf.writing import save, to_hf_tensors, write_gradients

__all__ = ['batch_sizes', 'load', 'read_batch', 'read_config', 'response_tokens', 'save', 'to_hf_tensors', 'write_gradients']
