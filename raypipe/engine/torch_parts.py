"""Private parts of torch that raypipe replaces, and that not every version has under one name.

A part is looked for, and no version's number is compared: builds are patched, and the next release is not known.

    part                                            2.11  2.12  2.13  2.14  2.15   what it does
    _hop_compile_and_call                             no   yes   yes   yes   yes   runs torch.cond and its like eagerly
    setup_compilation_env                            yes   yes   yes   yes   yes   what 2.11 enters to do that
    _checkpoint_without_reentrant_generator          yes   yes   yes   yes   yes   until 2.13 what a checkpoint runs
    _checkpoint_without_reentrant_generator_impl      no    no    no   yes   yes   what one runs since
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._higher_order_ops import utils
from torch.utils import checkpoint

__all__ = ["CHECKPOINT_PART", "PACKED_ARGUMENTS", "enter_around_operators"]

_SINCE_2_14 = "_checkpoint_without_reentrant_generator_impl"
PACKED_ARGUMENTS = hasattr(checkpoint, _SINCE_2_14)
"""Whether that function takes the arguments of the user's as a tuple and a dict, and its own by name."""
CHECKPOINT_PART = _SINCE_2_14 if PACKED_ARGUMENTS else "_checkpoint_without_reentrant_generator"
"""Name in torch.utils.checkpoint of the function that each checkpoint without reentrant autograd runs."""


def enter_around_operators(around: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on torch.cond, while_loop and their like run inside of a context where eager code calls them.

    Args:
        around: makes the context, once for each call.
    """
    if hasattr(utils, "_hop_compile_and_call"):
        run = utils._hop_compile_and_call

        def inside(function: Any, args: Any, kwargs: Any = None) -> Any:
            with around():
                return run(function, args, kwargs)

        utils._hop_compile_and_call = inside
        return
    environment: Any = utils.setup_compilation_env

    @contextmanager
    def both() -> Iterator[Any]:
        with around(), environment() as backend:
            yield backend

    def environment_inside() -> AbstractContextManager[Any]:
        # flex_attention enters it as well, by a name of its own: as it was where that was imported before, so always.
        caller = sys._getframe(1).f_globals.get("__name__")
        return environment() if caller == "torch.nn.attention.flex_attention" else both()

    utils.setup_compilation_env = environment_inside  # type: ignore[assignment]
