"""Outputs of shape (rows, 1) that meet targets of shape (rows,): every output with the targets of all rows.

    output (8, 1) - target (8,)  -->  (8, 8), whose mean is a loss, and trains towards the mean of the targets

torch only warns, in some losses. In a graph with a dynamic number of rows it shows for certain, for that number is a
symbol there. An axis that forward or loss adds itself, as in ``x[:, None] - y``, is meant; one that the data or the
last layer has is not.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from raypipe.engine.capture.regions import line_of
from raypipe.engine.capture.traced import Traced
from raypipe.errors import DataError

__all__ = ["crossed_rows", "refuse_crossed_rows"]


def refuse_crossed_rows(traced: Traced, data: Set[fx.Node], whose: str) -> None:
    """Refuse a graph in which numbers of the model and of the data meet so.

    Args:
        data: placeholders of columns; what they alone decide is of the data, all else of the model.
        whose: graph it is, for the message.

    Raises:
        DataError: with the line, and what to write.
    """
    symbols = {str(x.shape[0]) for x in (node.meta["val"] for node in traced.columns) if x.dim()}
    of_model, added = set[fx.Node](), set[fx.Node]()
    for node in traced.graph.nodes:
        given = node.all_input_nodes
        if node not in data and (node.op == "placeholder" or any(one in of_model for one in given)):
            of_model.add(node)
        if "unsqueeze" in str(node.target) or any(one in added for one in given):
            added.add(node)
        flat, tall = (_of_rows(given, dims, symbols) for dims in (1, 2))
        if node in added or flat is None or tall is None or (flat in of_model) == (tall in of_model):
            continue
        if _is_loss(node, tall, flat) or _crossed(node.meta.get("val"), tall.meta["val"], flat.meta["val"]):
            raise crossed_rows(whose, line_of(node), tall_is_output=tall in of_model)


def crossed_rows(whose: str, where: str, *, tall_is_output: bool) -> DataError:
    """The refusal.

    Args:
        where: " at FILE:LINE".
        tall_is_output: the output has shape (rows, 1), and the target (rows,); else the other way round.
    """
    first, second = ("output", "target") if tall_is_output else ("target", "output")
    return DataError(
        f"{whose} compares {first}s of shape (rows, 1) with {second}s of shape (rows,){where}: every output with the "
        f"targets of all rows. Make them alike, as in {first}.squeeze(1)."
    )


def _of_rows(nodes: Sequence[fx.Node], dims: int, symbols: Set[str]) -> fx.Node | None:
    """The first of shape (rows,), or of shape (rows, 1) for two dimensions."""
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != dims or any(size != 1 for size in value.shape[1:]):
            continue
        if isinstance(value.shape[0], torch.SymInt) and str(value.shape[0]) in symbols:
            return node
    return None


def _is_loss(node: fx.Node, tall: fx.Node, flat: fx.Node) -> bool:
    """Whether it is a loss of torch that compares number by number, whose inside the graph does not show."""
    name = str(node.target)
    numbers = all(one.meta["val"].is_floating_point() for one in (tall, flat))
    return numbers and ("_loss" in name or "kl_div" in name)


def _crossed(made: Any, tall: torch.Tensor, flat: torch.Tensor) -> bool:
    """Whether an operation on them made a tensor of shape (rows, rows)."""
    wanted = [str(tall.shape[0]), str(flat.shape[0])]
    found = made if isinstance(made, tuple | list) else (made,)
    return any(isinstance(x, torch.Tensor) and [str(size) for size in x.shape] == wanted for x in found)
