"""Modules in evaluation mode within a model in training mode: training puts all of it into training mode.

model.train()                      as every loop begins, and raypipe too
model.backbone.eval()              said before, it is undone by that; said after it, there is no such place here

A norm whose statistics should stay as they are would change them, so that is refused; of anything else a note tells.
A model whose own train() keeps modules in evaluation mode is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from raypipe.errors import CaptureError

__all__ = ["note_on_modes", "refuse_still_norms", "turned_on"]

_CURE = (
    "To keep it in evaluation mode, let the model's own train() do so: def train(self, mode=True): "
    "super().train(mode); self.get_submodule({name!r}).eval(); return self."
)


def turned_on(model: nn.Module) -> list[str]:
    """Paths of the modules that training would take out of evaluation mode, where the model itself is not in it."""
    if not model.training:
        return []
    before = {path: module.training for path, module in model.named_modules()}
    try:
        model.train()
        return [path for path, module in model.named_modules() if module.training and not before[path]]
    finally:
        for path, module in model.named_modules():
            module.training = before[path]


def refuse_still_norms(model: nn.Module) -> None:
    """Refuse norms in evaluation mode, whose statistics training would change.

    Raises:
        CaptureError: names the first one.
    """
    for path in turned_on(model):
        module = model.get_submodule(path)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            raise CaptureError(
                f"The module {path!r}, {type(module).__name__}, is in evaluation mode, and training puts the whole "
                f"model into training mode, as model.train() does: its statistics would change. "
                f"{_CURE.format(name=path)} If they shall change, call model.train() before."
            )


def note_on_modes(paths: Sequence[str]) -> str:
    """What a plan says of them; empty of none."""
    outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    if not outer:
        return ""
    more = f" and {len(outer) - 1} more" if len(outer) > 1 else ""
    return (
        f"the module {outer[0]!r}{more}, which was in evaluation mode, trains in training mode, dropout included, as "
        f"after model.train(). {_CURE.format(name=outer[0])}"
    )
