"""All rows of the zoo, family by family."""

from __future__ import annotations

from tests.zoo.cases import attention, convnets, dense, drawn, hidden, language, losses, repeated, shared
from tests.zoo.row import Row

__all__ = ["ROWS"]

ROWS: dict[str, Row] = {
    row.name: row
    for family in (dense, convnets, language, attention, repeated, shared, losses, drawn, hidden)
    for row in family.ROWS
}
"""By name, in the order of the table."""
