"""Rewards of responses: (prompt, response, answer), all text, -> a number."""
import importlib
import math
import os
import re
import sys
from typing import Callable

from branchreplay.config import UserError

NUMBER = re.compile(r'[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?')


def exact_match(prompt: str, response: str, answer: str) -> float:
  """1 if the response is the answer, but for white space around either."""
  return float(response.strip() == answer.strip())


def contains(prompt: str, response: str, answer: str) -> float:
  """1 if the answer stands somewhere in the response."""
  return float(answer.strip() in response)


def regex(prompt: str, response: str, answer: str) -> float:
  """1 if the regular expression `answer` matches somewhere in the response."""
  try:
    return float(re.search(answer, response) is not None)
  except re.error as error:
    raise UserError(f'the answer {answer!r} is no regular expression ({error}); correct it or use another --reward.')


def math_number(prompt: str, response: str, answer: str) -> float:
  """1 if the last number of the response equals that of the answer, to 1e-6 relative."""
  got, want = _last_number(response), _last_number(answer)
  if want is None:
    raise UserError(f'the answer {answer!r} holds no number; correct it or use another --reward.')
  return float(got is not None and math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-9))


def _last_number(text: str) -> float | None:
  found = NUMBER.findall(text)
  if not found:
    return None
  top, _, bottom = found[-1].replace(',', '').partition('/')
  return float(top) / float(bottom) if bottom and float(bottom) else float(top)


BUILT_IN = {'exact_match': exact_match, 'contains': contains, 'regex': regex, 'math_number': math_number}


def load(name: str) -> Callable:
  """The reward called `name`: a built-in one, or `module:function` of the user's own.

  The module is looked up from the current folder, then as Python does. UserError where
  there is no such thing.
  """
  if name in BUILT_IN:
    return BUILT_IN[name]
  module, colon, function = name.partition(':')
  if not colon or not module or not function:
    raise UserError(f'unknown reward {name!r}; use {", ".join(BUILT_IN)} or module:function of your own.')
  here = os.getcwd()
  if here not in sys.path:
    sys.path.insert(0, here)
  try:
    found = getattr(importlib.import_module(module), function)
  except (ImportError, SyntaxError) as error:
    raise UserError(f'the module of --reward={name} cannot be imported ({error}); run from its folder.')
  except AttributeError:
    raise UserError(f'module {module!r} has no {function!r}; correct --reward={name}.')
  if not callable(found):
    raise UserError(f'{name} is no function; correct --reward.')
  return found


def evaluate(reward: Callable, prompt: str, response: str, answer: str, where: str) -> float:
  """The reward as a float; UserError naming `where` if it raises or is no number."""
  try:
    value = reward(prompt, response, answer)
  except UserError as error:
    raise UserError(f'{where}: {error}')
  except Exception as error:
    raise UserError(f'{where}: the reward function raised {type(error).__name__} ({error}); correct it.')
  try:
    return float(value)
  except (TypeError, ValueError, OverflowError):
    raise UserError(f'{where}: the reward function returned {_short(value)}, no number of a sensible size; correct it.')


def _short(value) -> str:
  text = repr(value)
  return text if len(text) < 60 else f'{text[:60]}...'
