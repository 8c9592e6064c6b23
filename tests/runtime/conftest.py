"""Every file begins without handles of an earlier session of Ray."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_handles_of_an_earlier_session() -> None:
    """Ray's actor ids repeat from session to session: a handle collected late would end another's actor."""
    gc.collect()
