"""What torch says of a mistake, which is not the same in every release; our messages quote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["torch_says"]


def torch_says(mistake: Callable[[], Any]) -> str:
    """The error's text."""
    with pytest.raises(RuntimeError) as caught:
        mistake()
    return str(caught.value)
