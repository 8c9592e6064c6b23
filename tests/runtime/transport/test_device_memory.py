"""Links through device memory that both ends open: the contract, and what goes wrong where a step is left out.

The devices are fake, with memory that two processes can map and copies that are made as late as waits allow.
"""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.engine.codec import cuda
from raypipe.engine.device.device import Device
from raypipe.engine.messages.frame import FrameFormat
from raypipe.errors import LinkError
from raypipe.ir.schedule import Op
from raypipe.runtime.transport import device_memory, make_endpoint
from raypipe.runtime.transport.device_memory import (
    EMPTIED,
    FILLED,
    READ,
    SLOTS,
    WRITTEN,
    SlotGroup,
    reclaim,
    share_slots,
)  # fmt: skip
from raypipe.runtime.transport.process_group_channel import DeviceGroupChannel
from raypipe.runtime.transport.shared_memory import SharedMemoryChannel
from raypipe.runtime.transport.socket_channel import Connections
from tests.contract.channel import Pair, b, f
from tests.contract.two_processes import KERNELS, DeviceMemoryBetweenProcesses, on
from tests.emulators.cuda import emulated
from tests.fake_device import FakeDevice
from tests.runtime.transport.ends import HOST, opening, together, use_and_close
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

SLOT_BYTES = 1 << 12
WAIT_S = 20.0


class TestFakeDevicesInTwoProcesses(DeviceMemoryBetweenProcesses):
    device = "fake"
    folder: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _processes(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.folder = tmp_path_factory.mktemp("kernels")
        emulated(cuda.SOURCE, cls.folder)
        yield from cls.processes()

    @classmethod
    def environment(cls, rank: int) -> Mapping[str, str]:
        return {KERNELS: f"{cls.folder}/{cuda.SOURCE.stem}.so"}


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "SLOT_BYTES", SLOT_BYTES)


def open_link(*devices: Device, generation: int = 3) -> tuple[Any, Any]:
    """Open a link of "auto" between two workers of this process with these devices; return both ends."""
    ends = [make_endpoint("auto", HOST, None, device) for device in devices]
    try:
        first, second = together(
            *(lambda me=me: ends[me].open(opening(me, {1 - me: ends[1 - me].address}, generation)) for me in (0, 1))
        )
        return first[1], second[0]  # type: ignore[index]
    finally:
        for end in ends:
            end.close()


@contextlib.contextmanager
def linked(*devices: Device) -> Iterator[Pair]:
    pair = open_link(*devices)
    try:
        yield pair
    finally:
        for end in pair:
            end.close()


def arrive(pair: Pair, *devices: Device) -> bool:
    """Send messages both ways that the devices have yet to compute; return True if all arrive to the bit.

    They are smaller than a slot, of several slots, and of more slots than there are.
    """
    sizes = (1, 100, SLOT_BYTES // 4, SLOT_BYTES // 4 + 16, (2 * SLOTS + 1) * SLOT_BYTES // 4 + 3)
    for m, size in enumerate(sizes):
        for me, action in ((0, f(m)), (1, b(m))):
            x = torch.randn(size, generator=torch.Generator().manual_seed(2 * m + me))
            with devices[me].prepare_thread():
                pair[me].send(action, (on(devices[me], x) * 2,))
            try:
                (got,) = pair[1 - me].recv(action, WAIT_S)
            except LinkError:
                return False
            if not torch.equal(got, x * 2):  # type: ignore[arg-type]
                return False
    return True


@pytest.mark.parametrize("eager", [False, True])
def test_messages_arrive_in_pieces_of_a_slot(*, eager: bool) -> None:
    devices = FakeDevice(eager=eager), FakeDevice(eager=eager)
    with linked(*devices) as pair:
        assert [type(end) for end in pair] == [DeviceGroupChannel] * 2
        assert arrive(pair, *devices)


WAITS = (FILLED, EMPTIED, f"{Op.SEND_F}: sent once it is computed")


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait: str) -> None:
    """Without the second a slot is freed too early: a message of many pieces meets pieces that came after it."""
    devices = FakeDevice(eager=False, without=wait), FakeDevice(eager=False, without=wait)
    with linked(*devices) as pair:
        assert not arrive(pair, *devices)
        assert wait in devices[0].waits | devices[1].waits


@pytest.mark.parametrize("wait", [WRITTEN, READ])
def test_memory_whose_proof_does_not_come_is_not_used(wait: str) -> None:
    with linked(FakeDevice(eager=False, without=wait), FakeDevice(eager=False)) as pair:
        assert [type(end) for end in pair] == [SharedMemoryChannel] * 2


write_slot, place = SlotGroup._write_slot, SlotGroup._slot


def another_slot(group: SlotGroup, slot: int) -> None:
    write_slot(group, (slot + 1) % SLOTS)


def another_offset(group: SlotGroup, slot: int, part: torch.Tensor) -> torch.Tensor:
    """The receiver reads each slot from its second byte on."""
    return place(group, slot, part).roll(-1) if group._owner else place(group, slot, part)


def another_size(group: SlotGroup, slot: int, part: torch.Tensor) -> torch.Tensor:
    """The sender's slots are smaller, and overlap."""
    assert group._memory is not None
    return group._memory[slot * (SLOT_BYTES if group._owner else SLOT_BYTES - 64) :][: part.numel()]


@pytest.mark.parametrize(
    ("name", "fault"), [("_write_slot", another_slot), ("_slot", another_offset), ("_slot", another_size)]
)
def test_a_wrong_slot_offset_or_size_changes_bits(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    devices = FakeDevice(eager=False), FakeDevice(eager=False)
    with linked(*devices) as pair:
        monkeypatch.setattr(SlotGroup, name, fault)
        assert not arrive(pair, *devices)


class Stale(FakeDevice):
    """Device that opens the memory of an earlier generation."""

    first: bytes = b""

    def open_shared(self, handle: bytes, nbytes: int) -> torch.Tensor:
        self.first = self.first or handle
        return super().open_shared(self.first, nbytes)


def test_memory_of_an_earlier_generation_is_not_used() -> None:
    devices = Stale(eager=False), FakeDevice(eager=False)
    with linked(*devices) as pair, linked(*devices) as later:
        assert [type(end) for end in pair] == [DeviceGroupChannel] * 2
        assert [type(end) for end in later] == [SharedMemoryChannel] * 2


def test_a_slot_that_does_not_exist_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = FakeDevice(eager=False), FakeDevice(eager=False)
    with linked(*devices) as pair:
        monkeypatch.setattr(SlotGroup, "_write_slot", lambda group, _: write_slot(group, SLOTS))
        with devices[0].prepare_thread():
            pair[0].send(f(0), (on(devices[0], torch.ones(3)),))
        with pytest.raises(LinkError, match=f"slot {SLOTS} of {SLOTS} slots"):
            pair[1].recv(f(0), WAIT_S)


# Where memory cannot be shared.


class Unshared(FakeDevice):
    def share(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        raise RuntimeError("CUDA error: operation not supported")


class Unopened(FakeDevice):
    def open_shared(self, handle: bytes, nbytes: int) -> torch.Tensor:
        raise ImportError("no module named cupy")


@pytest.mark.parametrize("kind", [Unshared, Unopened])
def test_if_one_end_cannot_both_go_through_the_host(kind: type[FakeDevice]) -> None:
    for devices in ((kind(eager=False), FakeDevice(eager=False)), (FakeDevice(eager=False), kind(eager=False))):
        pair = open_link(*devices)
        assert [type(end) for end in pair] == [SharedMemoryChannel] * 2
        x = torch.arange(1 << 18)
        pair[0].send(f(0), (x,))
        assert torch.equal(pair[1].recv(f(0), WAIT_S)[0], x)
        use_and_close([pair])


@pytest.mark.parametrize("silent", [False, True])
def test_a_peer_that_ends_or_is_silent_meanwhile_ends_the_opening(*, silent: bool) -> None:
    ahead, back = socket.socketpair(), socket.socketpair()
    ends = Connections("link", FrameFormat(0, 1), ahead[0], back[1])
    if not silent:
        ahead[1].close()
        back[0].close()
    earlier = mapped()
    with pytest.raises(LinkError, match="link: the peer ended while"):
        share_slots(ends, FakeDevice(eager=False), 0.05)
    for sock in (*ahead, *back):
        sock.close()
    reclaim()
    wait_until(lambda: set(mapped()) <= set(earlier))


# What remains.


def mapped() -> list[str]:
    """List the memory of fake devices that this process has mapped, by inode, once for each mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:fake-device" in line]


def test_memory_is_freed_once_both_ends_have_closed_it() -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()  # devices of the tests before
    earlier, files = mapped(), len(list(descriptors.iterdir()))
    first, second = open_link(FakeDevice(eager=False), FakeDevice(eager=False))
    own = set(mapped()) - set(earlier)
    assert len(own) == 2, "memory of two directions"
    first.close()
    reclaim()
    assert len(device_memory._LENT) == 1, "the sender at the other end may still write"
    second.close()
    assert device_memory._LENT == {}
    wait_until(lambda: own.isdisjoint(mapped()))
    wait_until(lambda: len(list(descriptors.iterdir())) <= files)
