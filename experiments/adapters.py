"""Checkpoints of LoRA runs hold the adapters, not the frozen matrices, which --init has.

A mark of every bit of the frozen ones is saved beside them, so that adapters are never put on
other matrices than those they were trained with. Without LoRA nothing is frozen, and all is held.
"""
from branchreplay import checkpoint, lora
from branchreplay.config import ModelConfig, UserError


def mark(model: ModelConfig, params) -> dict:
  """What a checkpoint's meta says of the frozen leaves of `params`; nothing where there are none."""
  return {'frozen': checkpoint.fingerprint(lora.frozen(model, params))} if model.lora_rank else {}


def rejoined(model: ModelConfig, part, meta: dict, base, folder: str):
  """Parameters: `part`, the trainable leaves of a checkpoint, with the frozen ones of `base`, as --init={folder} gives them.

  UserError where the checkpoint's meta is not the mark of `base`.
  """
  if meta != mark(model, base):
    raise UserError(f'the weights in {folder} are not those that the adapters of this run were trained with; put those back, '
                    'or give another --workdir.')
  return lora.join(part, base)
