"""Checksums of a folder: written when it is whole, so that a later change of any byte is seen."""
import hashlib
import json
import os
from pathlib import Path

SEAL = 'checksums.json'


def digests(folder: Path) -> dict[str, str]:
  """Path in `folder` -> SHA-256, for every file but the seal."""
  found = {}
  for path in sorted(p for p in folder.rglob('*') if p.is_file() and p.name != SEAL):
    with path.open('rb') as file:
      found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, 'sha256').hexdigest()
  return found


def seal(folder: Path) -> None:
  """Writes the checksums of all files in `folder` beside them; OSError where it cannot."""
  part = folder / f'{SEAL}.{os.getpid()}'
  held = digests(folder)
  with part.open('w', encoding='utf-8') as file:
    json.dump(held, file)
    file.flush()
    os.fsync(file.fileno())
  part.replace(folder / SEAL)


def fault(folder: Path) -> str | None:
  """What is wrong with a sealed folder, in a few words; None where every byte is as it was sealed."""
  try:
    held = json.loads((folder / SEAL).read_text(encoding='utf-8'))
    found = digests(folder)
  except FileNotFoundError:
    return 'it was never finished'
  except (OSError, ValueError) as error:
    return f'its {SEAL} cannot be read ({error})'
  if not isinstance(held, dict):
    return f'its {SEAL} holds no checksums'
  for name in sorted(held.keys() | found.keys()):
    if held.get(name) != found.get(name):
      return f'{name} is {"missing" if name not in found else "new" if name not in held else "changed"}'
  return None
