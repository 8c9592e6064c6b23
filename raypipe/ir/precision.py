"""Precisions of a run, by the name of PipelineConfig.precision.

    name            weights in forward   operand dtypes       loss
    fp32            the parameters       unchanged            unscaled
    bf16-autocast   the parameters       by torch.autocast    unscaled
    bf16            bf16 copies          unchanged            unscaled
    fp16            fp16 copies          unchanged            scaled, as by torch.amp.GradScaler

Parameters, sums of gradients and optimizer state are fp32 in all of them (Micikevicius et al., arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of one precision.

    Attributes:
        leaves: torch dtype name of the parameter copies that forwards use; "" for no copies.
        autocast: dtype of torch.autocast; "" for no autocast.
        scaled: the loss is scaled, and a step with overflowing gradients is skipped.
    """

    name: str
    leaves: str = ""
    autocast: str = ""
    scaled: bool = False

    @property
    def leaf_factor(self) -> float:
        """Bytes of the parameter copies per byte of fp32 parameters."""
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
