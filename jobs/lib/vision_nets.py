"""The ten vision nets that partition papers cut, from torchvision, with ten classes as for CIFAR-10.

torchvision's wheels are built for one build of torch; beside another one its C++ operators do not load, and importing
it fails on their names. The nets use none of these operators, so their names are declared first.
"""

from __future__ import annotations

import contextlib
import re
from importlib import util
from pathlib import Path
from typing import Any

import torch

__all__ = ["IMAGE_SIZES", "build"]

IMAGE_SIZES = {
    "vgg16": 64, "resnet18": 64, "resnet50": 64, "resnet101": 64, "alexnet": 224, "resnext50_32x4d": 64,
    "resnext101_32x8d": 64, "inception_v3": 128, "densenet121": 64, "squeezenet1_0": 96,
}  # fmt: skip
"""Pixels of a side: small ones, so that a profile on a CPU takes seconds; the operations are the same."""

_LIBRARIES: list[torch.library.Library] = []  # a library's names last as long as it does


def build(name: str) -> torch.nn.Module:
    """A net of IMAGE_SIZES with random parameters, the same ones every time."""
    _declare_operators()
    from torchvision import models

    torch.manual_seed(0)
    extra: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    net: torch.nn.Module = getattr(models, name)(num_classes=10, **extra)
    return net


def _declare_operators() -> None:
    found = util.find_spec("torchvision")
    if found is None or found.origin is None or util.find_spec("PIL") is None:
        raise SystemExit("This needs torchvision and its images: pip install --no-deps torchvision pillow")
    if _LIBRARIES:
        return
    source = Path(found.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "DEF")
    names = re.findall(r'register_meta\("(\w+)"|torchvision::(\w+)"', source)
    for operator in sorted({"nms", *(first or second for first, second in names)}):
        with contextlib.suppress(RuntimeError):  # the build fits after all
            library.define(f"{operator}(Tensor x) -> Tensor")
    _LIBRARIES.append(library)
