"""Codecs on the device that computes: the kernels that a GPU would run, in a run, on a fake device.

The kernels are those of ``kernels.cu``, compiled for this processor; what the links' threads do in host memory on the
CPU is the oracle, to the bit.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from raypipe.engine.codec import Codec, Codecs, cuda
from raypipe.engine.device import CPU, Crosses
from raypipe.errors import RaypipeError
from tests.device_run import run
from tests.emulators.cuda import Emulated, emulated
from tests.exactness import same_bits
from tests.fake_device import FakeDevice

PAIRS = {
    "16 bits": Codecs(Codec("bf16"), Codec("fp16")),
    "int8 at random": Codecs(Codec("int8", rounding_seed=7), Codec("int8")),
    "few bits": Codecs(Codec("fp8"), Codec("int4", rounding_seed=3)),
}
Found = list[torch.Tensor | float | None]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return emulated(cuda.SOURCE, tmp_path_factory.mktemp("kernels"))


@cache
def on_links(name: str) -> Found:
    return run(lambda worker: CPU, codecs=PAIRS[name])


def same(a: Found, b: Found) -> bool:
    return len(a) == len(b) and all(
        same_bits(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_a_run_computes_what_codecs_on_links_make_of_it(kernels: Emulated, name: str, *, eager: bool) -> None:
    devices: list[FakeDevice] = []

    def device_of(worker: int) -> FakeDevice:
        devices.append(FakeDevice(eager=eager, kernels=kernels))
        return devices[-1]

    found = run(device_of, codecs=PAIRS[name])
    assert same(found, on_links(name))
    assert not same(found, run(lambda worker: CPU))  # codecs lose something, so they were there
    both = {way for device in devices for way in device.launched}
    forward, backward = PAIRS[name]
    for codec in (forward, backward):
        assert {cuda.kernel_name(way, codec.name, torch.float32) for way in ("encode", "decode")} <= both


def test_a_device_without_kernels_leaves_codecs_to_the_links() -> None:
    found = run(lambda worker: FakeDevice(eager=False), codecs=PAIRS["few bits"])
    assert same(found, on_links("few bits"))


@pytest.mark.parametrize(
    "wait",
    [f"{Crosses.OUTPUTS}: copied once they are computed", f"{Crosses.INPUT_GRADS}: read once they are in host memory",
     f"{Crosses.INPUTS}: computed with once they are on the device"],
)  # fmt: skip
def test_a_wait_that_is_missing_around_the_kernels_changes_bits(kernels: Emulated, wait: str) -> None:
    def late(eager: bool, worker: int) -> FakeDevice:
        return FakeDevice(eager=eager, without=wait, kernels=kernels)

    def differs(eager: bool) -> bool:
        try:
            return not same(run(partial(late, eager), codecs=PAIRS["few bits"]), on_links("few bits"))
        except RaypipeError:  # what it reads is not finite
            return True

    assert differs(False) or differs(True)
