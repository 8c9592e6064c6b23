"""Fingerprint of a module or a function: equal fingerprints mean equal work on equal shapes.

A fingerprint covers the Python state and code that capture/python_state.py reads, classes and modes of modules, and
shapes, dtypes and requires_grad of parameters and buffers, but not their contents. Fingerprints do not depend on the
process, so profiles can be cached by them.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from raypipe.capture.python_state import CACHE, read_memory_of


def fingerprint(thing: Any) -> str:
    """Compute the fingerprint of a module, a function or an object that contains such, as hexadecimal digits."""
    values = read_memory_of(thing, "it").values
    parts = [f"{path} {value!r}" for path, value in values.items() if not path.startswith(CACHE)]
    if isinstance(thing, nn.Module):
        modules = thing.named_modules(remove_duplicate=False)
        parts += [f"{path} {type(x).__module__}.{type(x).__qualname__} {x.training}" for path, x in modules]
        tensors = (*thing.named_parameters(), *thing.named_buffers())
        parts += [f"{name} {list(x.shape)} {x.dtype} {x.requires_grad}" for name, x in tensors]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
