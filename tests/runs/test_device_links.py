"""Whole runs whose workers are linked through memory of fake devices: the bits of runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raypipe.engine import local
from raypipe.engine.device.device import Device
from raypipe.engine.messages.channel import Channel
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram
from raypipe.runtime.transport import device_memory, make_endpoint
from raypipe.runtime.transport.endpoint import LinkSetup
from tests.emulators.cuda import Emulated
from tests.fake_device import FakeDevice
from tests.runs.test_fake_device import PAIRS, RUNS, differs, kernels, plainly, several_chunks
from tests.runtime.transport.ends import HOST, WAIT_S, together

__all__ = ["kernels", "several_chunks"]


class Linked:
    """Devices of the workers of one run, and the links between them.

    Args:
        kernels, eager: see FakeDevice.
    """

    def __init__(self, kernels: Emulated | None, *, eager: bool) -> None:
        self._kernels, self._eager = kernels, eager
        self._devices: dict[int, FakeDevice] = {}
        self.opened: list[Channel] = []

    def device(self, worker: int) -> Device:
        if worker not in self._devices:
            self._devices[worker] = FakeDevice(eager=self._eager, kernels=self._kernels)
        return self._devices[worker]

    def channels(self, placements: Sequence[Placement], programs: Sequence[StageProgram]) -> list[dict[int, Channel]]:
        """Open the links that ``channels_between`` makes in memory."""
        ends = [make_endpoint("auto", HOST, None, self.device(worker)) for worker in range(len(placements))]
        addresses = [end.address for end in ends]

        def opened(worker: int) -> dict[int, Channel]:
            placement = placements[worker]
            peers = placement.neighbours(programs)
            setup = LinkSetup(
                me=worker,
                addresses={peer: addresses[peer] for peer in peers},
                generation=0,
                run_id="run",
                capacity={peer: placement.message_capacity(programs, peer) for peer in peers},
                timeout_s=WAIT_S,
                names={peer: f"worker {worker} <-> worker {peer}" for peer in peers},
                secret=b"secret",
            )
            return dict(ends[worker].open(setup))

        found = together(*(lambda worker=worker: opened(worker) for worker in range(len(ends))))
        for end in ends:
            end.close()
        self.opened += [channel for channels in found for channel in channels.values()]  # type: ignore[attr-defined]
        return found  # type: ignore[return-value]


@pytest.mark.usefixtures("several_chunks")
@pytest.mark.parametrize("name", [name for name in RUNS if name != "a state that goes back"])
def test_runs_have_the_same_bits(kernels: Emulated, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "SLOT_BYTES", 1 << 10)
    plainly(name)  # over links in memory
    linked = Linked(kernels if name in PAIRS else None, eager=False)
    monkeypatch.setattr(local, "channels_between", linked.channels)
    assert not differs(name, linked.device)
    assert linked.opened
    assert all(channel.on_device for channel in linked.opened)
