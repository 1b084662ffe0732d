"""Text to tokens: bytes by default, or a checkpoint's tokenizer.json and chat template."""
import contextlib
import json
import os
from pathlib import Path
import sys
from typing import Callable, NamedTuple

import numpy as np

from branchreplay.config import UserError

VOCAB_SIZE = 256


class Tokenizer(NamedTuple):
  """Text to tokens and back."""
  encode: Callable  # str -> i32 [length]
  decode: Callable  # tokens [length] -> str
  vocab_size: int  # every token is below it
  stop_token: int  # ends a response; -1: none
  chat: Callable | None  # list of {role, content} -> str; None: no chat template


def is_text(value: str) -> bool:
  """Whether a string can be written as UTF-8; JSON may hold half of a surrogate pair, which cannot."""
  try:
    value.encode('utf-8')
    return True
  except UnicodeEncodeError:
    return False


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


BYTES = Tokenizer(encode, decode, VOCAB_SIZE, ord('\n'), None)


def load(folder, model_vocab: int) -> Tokenizer:
  """The tokenizer of a checkpoint folder: tokenizer.json, and its chat template if it has one.

  Special tokens in a text count as such; none are added. UserError where the file is
  missing or corrupt, or holds ids that a vocabulary of `model_vocab` does not have.
  """
  import tokenizers  # only where a checkpoint brings a tokenizer
  folder = Path(folder)
  file = folder / 'tokenizer.json'
  if not file.is_file():
    raise UserError(f'{folder} has no tokenizer.json; put it there or use --tokenizer=bytes.')
  broken = f'{file} is no tokenizer (%s); copy it anew from where the checkpoint came from.'
  with _without_panics():
    held = _guarded(lambda: tokenizers.Tokenizer.from_file(str(file)), broken)
  held.no_padding()
  held.no_truncation()
  size = max(held.get_vocab(with_added_tokens=True).values(), default=-1) + 1
  if size > model_vocab:
    raise UserError(f'{file} has token ids up to {size - 1}, the model a vocabulary of {model_vocab}; '
                    'use the tokenizer of this checkpoint.')
  settings = {name: _json(folder / name) for name in ('tokenizer_config.json', 'generation_config.json')}
  return Tokenizer(
      encode=lambda text: np.array(_guarded(lambda: held.encode(text, add_special_tokens=False).ids, broken), np.int32),
      decode=lambda tokens: _guarded(lambda: held.decode([int(t) for t in tokens], skip_special_tokens=True), broken),
      vocab_size=size, stop_token=_stop_token(held, *settings.values()),
      chat=_chat_template(folder, settings['tokenizer_config.json']))


@contextlib.contextmanager
def _without_panics():
  """Keeps what the library's native code writes on stderr when it panics from the user, who is told in a sentence."""
  sys.stderr.flush()
  kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


def _guarded(call: Callable, sentence: str):
  """What `call` returns; UserError where the library raises (bare Exceptions) or panics (a BaseException)."""
  try:
    return call()
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:
    raise UserError(sentence % ' '.join(str(error).split()))


def _json(file: Path) -> dict:
  if not file.is_file():
    return {}
  try:
    value = json.loads(file.read_text(encoding='utf-8'))
  except (ValueError, OSError, RecursionError) as error:
    raise UserError(f'{file} is no JSON ({error}); copy it anew.')
  if not isinstance(value, dict):
    raise UserError(f'{file} is no JSON object; copy it anew.')
  return value


def _text(value) -> str | None:
  """A special token as configs write it: a string, or an object that holds it."""
  value = value.get('content') if isinstance(value, dict) else value
  return value if isinstance(value, str) and is_text(value) else None


def _stop_token(held, tokenizer_config: dict, generation_config: dict) -> int:
  token = _text(tokenizer_config.get('eos_token'))
  found = held.token_to_id(token) if token is not None else None
  if found is None:
    found = generation_config.get('eos_token_id')
    found = found[0] if isinstance(found, list) and found else found
  return found if isinstance(found, int) and not isinstance(found, bool) else -1


def _chat_template(folder: Path, config: dict) -> Callable | None:
  """Messages -> text by the checkpoint's template, in a sandbox; None where there is none."""
  file = folder / 'chat_template.jinja'
  source = file.read_text(encoding='utf-8') if file.is_file() else config.get('chat_template')
  if isinstance(source, list):  # several, by name
    source = next((t.get('template') for t in source if isinstance(t, dict) and t.get('name') == 'default'), None)
  if not isinstance(source, str):
    return None
  import jinja2
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  def refuse(message):
    raise jinja2.TemplateError(message)

  environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'])
  environment.globals['raise_exception'] = refuse
  environment.filters['tojson'] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
  special = {name: _text(config.get(name)) or '' for name in ('bos_token', 'eos_token', 'unk_token', 'pad_token')}
  try:
    template = environment.from_string(source)
  except jinja2.TemplateError as error:
    raise UserError(f'the chat template of {folder} is malformed ({error}); copy it anew.')

  def render(messages) -> str:
    try:
      return template.render(messages=messages, add_generation_prompt=True, **special)
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
      raise UserError(f'the chat template of {folder} refuses a prompt ({error}); correct its messages.')
  return render
