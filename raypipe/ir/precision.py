"""What a run computes in, by the name that a configuration gives it.

    name            leaves of a forward    what operations take       loss
    fp32            the parameters         what they are given        as it is
    bf16-autocast   the parameters         what torch.autocast says   as it is
    bf16            bf16 copies            what they are given        as it is
    fp16            fp16 copies            what they are given        scaled, as torch.amp.GradScaler scales it

Parameters, sums of gradients and optimizer state are fp32 in all of them (Micikevicius et al., arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FP32", "PRECISIONS", "Precision"]


@dataclass(frozen=True, slots=True)
class Precision:
    """One of them.

    Attributes:
        leaves: dtype of the copies of the parameters that forwards use, as torch names it; "" for no copies.
        autocast: dtype of torch.autocast; "" for none.
        scaled: the loss is scaled, and a step whose gradients overflow is left out.
    """

    name: str
    leaves: str = ""
    autocast: str = ""
    scaled: bool = False

    @property
    def leaf_factor(self) -> float:
        """Bytes of those copies per byte of parameters."""
        return 0.5 if self.leaves else 0.0


FP32 = Precision("fp32")

PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        FP32,
        Precision("bf16", leaves="bfloat16"),
        Precision("bf16-autocast", autocast="bfloat16"),
        Precision("fp16", leaves="float16", scaled=True),
    )
}
