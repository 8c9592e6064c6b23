"""Settings of torch go with a run to processes that have others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from raypipe.engine.torch_settings import TorchSettings, torch_settings
from raypipe.errors import StageError
from tests.sources import ROOT

pytestmark = pytest.mark.engine

SAID: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "no tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "all of a backend": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "one operation": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "plain attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "no mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
}


def main() -> None:
    """Two processes for each of these: one says it, the other one is told. Prints whether they are alike, and other."""

    def child(run: Callable[[], bytes]) -> bytes:
        there, here = os.pipe()
        if not os.fork():
            with os.fdopen(here, "wb") as pipe:
                pipe.write(run())
            os._exit(0)
        os.close(here)
        with os.fdopen(there, "rb") as pipe:
            return pipe.read()

    def say(name: str) -> bytes:
        SAID[name]()
        return pickle.dumps(torch_settings())

    def told(packed: bytes) -> bytes:
        settings: TorchSettings = pickle.loads(packed)
        settings.take()
        return pickle.dumps(torch_settings())

    usual = torch_settings()
    for name in SAID:
        said = child(lambda name=name: say(name))  # type: ignore[misc]
        wanted, found = pickle.loads(said), pickle.loads(child(lambda said=said: told(said)))  # type: ignore[misc]
        print(name, "|", wanted == found, "|", wanted != usual)


def test_another_process_takes_them_however_they_were_said() -> None:
    script = "from tests.engine.test_torch_settings import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert ran.stdout.splitlines() == [f"{name} | True | {name != 'nothing'}" for name in SAID]


def test_what_a_worker_cannot_take_is_named() -> None:
    with pytest.raises(StageError, match=r"cannot set torch\.backends\.mkldnn\.enabled to 'never', as it is where"):
        TorchSettings((("backends.mkldnn.enabled", "never"),)).take()
