"""Links over NCCL between two GPUs of this machine: the contract of channels, generations, and giving up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.errors import LinkError
from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.process_group import ProcessGroupEndpoint, why_no_nccl
from tests.contract.channel import WAIT_S, ChannelContract, Failing, Pair, b, f
from tests.runtime.transport.ends import HOST, close, together


@pytest.fixture(autouse=True, scope="module")
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2 or why_no_nccl():
        pytest.skip(f"NCCL joins two GPUs, {torch.cuda.device_count()} here. {why_no_nccl()}", allow_module_level=True)


def opened(generation: int = 3, max_tensors: int = 4, gpus: tuple[int, int] = (0, 1)) -> Pair:
    ends = [ProcessGroupEndpoint(HOST, None, CudaDevice(gpu)) for gpu in gpus]

    def enter(me: int) -> Any:
        at = {1 - me: ends[1 - me].address}
        known = {"capacity": {1 - me: max_tensors}, "timeout_s": WAIT_S, "names": {1 - me: "link"}, "secret": b"secret"}
        return ends[me].open(LinkSetup(me=me, addresses=at, generation=generation, run_id="run", **known))[1 - me]  # type: ignore[arg-type]

    try:
        first, second = together(lambda: enter(0), lambda: enter(1))
    finally:
        for end in ends:
            end.close()
    return first, second  # type: ignore[return-value]


class TestNccl(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return opened(max_tensors=max_tensors)


def test_tensors_on_one_gpu_arrive_on_the_other_in_one_generation_after_another() -> None:
    for generation in (3, 4):
        first, second = opened(generation)
        x = torch.arange(10_000, dtype=torch.float32, device="cuda:0").requires_grad_()
        first.send(f(0), (x * 2,))
        (got,) = second.recv(f(0), WAIT_S)
        assert got is not None
        assert got.device == torch.device("cuda", 1)
        assert torch.equal(got.cpu(), x.detach().cpu() * 2)
        close({0: first}, {0: second})


def test_a_wait_on_a_gpu_ends_when_the_link_is_given_up() -> None:
    first, second = opened()
    waiting = Failing(lambda: second.recv(f(0), WAIT_S))
    first.abort("test")
    assert "test" in str(waiting.result())
    with pytest.raises(LinkError, match="test"):
        first.recv(b(0), WAIT_S)
    close({0: first}, {0: second})


def test_two_workers_on_one_gpu_are_refused() -> None:
    with pytest.raises(LinkError, match="share a GPU, between which NCCL makes no link"):
        opened(gpus=(0, 0))
