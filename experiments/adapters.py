"""What a checkpoint of a LoRA run holds of the parameters: the adapters, not the frozen matrices, which --init has.

A mark of every bit of the frozen ones is saved beside them, so that adapters are never put on
other matrices than those they were trained with. Without LoRA nothing is frozen, and all is held.
"""
from branchreplay import checkpoint, lora
from branchreplay.config import ModelConfig, UserError


def held(model: ModelConfig, params) -> tuple:
  """The leaves that a checkpoint holds, and its meta, a JSON dict."""
  return lora.trainable(model, params), {'frozen': checkpoint.fingerprint(lora.frozen(model, params))} if model.lora_rank else {}


def rejoined(model: ModelConfig, part, meta: dict, base, folder: str):
  """Parameters: `part` of a checkpoint with the frozen leaves of `base`, as --init={folder} gives them; UserError if it had others."""
  if meta != held(model, base)[1]:
    raise UserError(f'the weights in {folder} are not those that the adapters of this run were trained with; put those back, '
                    'or give another --workdir.')
  return lora.join(part, base)
