"""When two predicted times are the same for a choice between them."""

from __future__ import annotations

__all__ = ["EVEN"]

EVEN = 0.005
"""Predicted seconds this near to each other, relatively, count as equal: then whatever costs less is taken, memory,
workers or accuracy. Models and measurements are not exact enough to tell them apart."""
