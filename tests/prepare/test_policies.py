"""What threads of one process cannot do is refused with what to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raypipe.errors import ConfigError
from raypipe.prepare.policies import refuse_in_threads

pytestmark = pytest.mark.engine


def test_threads_do_not_grow() -> None:
    refuse_in_threads(None, detached=False)
    refuse_in_threads(SimpleNamespace(num_workers=8), detached=False)
    with pytest.raises(ConfigError, match=r"num_workers=\(2, 8\)\): threads .* Give num_workers=8"):
        refuse_in_threads(SimpleNamespace(num_workers=(2, 8)), detached=False)


def test_threads_end_with_their_process() -> None:
    with pytest.raises(ConfigError, match="cannot be detached"):
        refuse_in_threads(None, detached=True)
