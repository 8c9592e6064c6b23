"""Columns of any length: token ids whose second dimension may change from step to step.

A graph is right for every length if no decision in it was taken by the length. Where one was, nothing in the graph
would notice another length, so such a model is traced for one.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["asks_for_length", "is_tokens"]

UNLIMITED = 1 << 40
"""A length that nobody reaches; a bound below it comes from the code."""


def is_tokens(value: torch.Tensor) -> bool:
    """Whether a column has a length that may change: numbers of words, shape (b, length)."""
    return value.dim() == 2 and not value.is_floating_point() and not value.is_complex() and value.shape[1] > 1


def asks_for_length(program: torch.export.ExportedProgram) -> bool:
    """Whether a decision was taken by the length of a column, other than that columns of one length agree.

    torch.export notes such decisions as guards; the stages do not check them.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    shapes: list[Any] = [value.shape for value in values if isinstance(value, torch.Tensor)]
    batches = [shape[0].node for shape in shapes if shape and isinstance(shape[0], torch.SymInt)]
    lengths = [shape[1].node for shape in shapes if len(shape) == 2 and isinstance(shape[1], torch.SymInt)]
    lengths = [size for size in lengths if size.expr.is_Symbol]  # not one that became a number while tracing
    if not lengths:
        return False
    agreed: dict[Any, Any] = {}
    for sizes in (batches, lengths):  # those that are equal in the example count as one
        first: dict[int, Any] = {}
        agreed.update({size.expr: first.setdefault(size.hint, size.expr) for size in sizes})
    symbols = {size.expr for size in lengths}
    known = lengths[0].shape_env
    ranges = [known.var_to_range[symbol] for symbol in symbols]
    if any(found.lower > 2 or found.upper < UNLIMITED for found in ranges):
        return True
    asked = (guard.expr for guard in known.guards if symbols & guard.expr.free_symbols)
    return not all(expr.subs(agreed) == True for expr in asked)  # noqa: E712  (sympy's own truth)
