"""Bytes as tokens: token t is byte t of the UTF-8 text."""
import numpy as np

from branchreplay.config import UserError

VOCAB_SIZE = 256


def encode(text: str | bytes) -> np.ndarray:
  """The bytes of `text` as int32 tokens [length]."""
  data = text.encode('utf-8') if isinstance(text, str) else text
  return np.frombuffer(data, np.uint8).astype(np.int32)


def decode(tokens) -> str:
  """The text of `tokens` [length]; bytes that are not UTF-8 become U+FFFD.

  Raises UserError for a token that is not a byte.
  """
  tokens = np.asarray(tokens, np.int64)
  wrong = tokens[(tokens < 0) | (tokens >= VOCAB_SIZE)]
  if wrong.size:
    raise UserError(f'token {wrong[0]} is not a byte; decode only tokens from 0 to 255.')
  return tokens.astype(np.uint8).tobytes().decode('utf-8', errors='replace')
