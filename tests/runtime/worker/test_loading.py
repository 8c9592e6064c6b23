"""State of stages is made where it is computed with, from given tensors and from copies of another worker."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from raypipe.engine.copy import StageCopies
from raypipe.engine.device.device import CPU, TransferKind
from raypipe.engine.io.checkpoint import GivenTensors, load_stage
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import Settings, StageState
from raypipe.engine.setup import RunSetup
from raypipe.runtime.worker.loading import empty_states, states_of
from tests.engine.copy.stages import source_of
from tests.exactness import captured, programs, same_bits
from tests.fake_device import FakeDevice

pytestmark = pytest.mark.ray

RUN = RunSetup(partial(torch.optim.AdamW, lr=0.1), None, {}, Settings(0, "mean", None, 30.0))


def stepped(states: list[StageState]) -> None:
    """One step with the gradients 1."""
    for state in states:
        for parameter in state.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        if state.optimizer is not None:
            state.optimizer.step()


def on_host(states: list[StageState], crossing: DeviceTransfer) -> list[torch.Tensor]:
    return [x for s in states for x in crossing.copied({**s.parameters, **s.buffers}, TransferKind.SNAPSHOT).values()]


@pytest.mark.parametrize("eager", [False, True])
def test_state_lies_on_the_device_and_goes_on_from_a_copy(*, eager: bool) -> None:
    cut, made = programs("unet", 2), captured("unet")[1]
    device = FakeDevice(eager=eager)
    crossing, given = DeviceTransfer(device), GivenTensors({**made.parameters, **made.buffers})
    plain = states_of(RUN, cut, [given], DeviceTransfer(CPU))
    states = states_of(RUN, cut, [given], crossing)
    assert all(device.holds(x) for state in states for x in (*state.parameters.values(), *state.buffers.values()))
    assert all(
        same_bits(a, b) for a, b in zip(on_host(states, crossing), on_host(plain, DeviceTransfer(CPU)), strict=True)
    )
    stepped(plain)
    with device.prepare_thread():
        stepped(states)
    sources = []
    for program, state in zip(cut, states, strict=True):
        copies = StageCopies(program, state, crossing)
        copies.take(1, state.updates)
        sources.append(source_of(copies, 1))
    again = [empty_states(RUN, [program], source, crossing)[0] for program, source in zip(cut, sources, strict=True)]
    for program, state, source in zip(cut, again, sources, strict=True):
        load_stage(source, program, state, crossing=crossing)
    assert all(device.holds(x) for state in again for x in state.parameters.values())
    stepped(plain)
    with device.prepare_thread():
        stepped(again)
    assert all(
        same_bits(a, b) for a, b in zip(on_host(again, crossing), on_host(plain, DeviceTransfer(CPU)), strict=True)
    )
