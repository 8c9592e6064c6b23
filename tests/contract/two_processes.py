"""The contract of channels for links between two processes; each end is in a process that the test directs.

    test --calls, by name--> RemoteEnd ==connection==> process 0: channel <=== link ===> channel :process 1

Tensors go to and from the processes through host memory; each process moves them to its own device.
``python -m tests.contract.two_processes DEVICE`` is such a process.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import errors
from raypipe.engine.codec import Codec
from raypipe.engine.codec.codec import CodedTensor
from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.messages.channel import Message, Stamp
from raypipe.engine.messages.frame import FrameFormat
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op
from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.process_group import ProcessGroupEndpoint
from tests.contract.channel import WAIT_S, ChannelContract, Failing, Pair, b, f

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
STEPS = 200
LARGE_ELEMENTS = 1 << 22
TYPES: Mapping[type, Callable[..., Any]] = {
    Action: lambda stage, op, microbatch: Action(stage, Op(op), microbatch),
    Codec: Codec,
    CodedTensor: CodedTensor,
    FrameFormat: FrameFormat,
    Message: lambda tensors, version: Message.of(tensors, version, Stamp()),
}
NAMES = {kind.__name__: kind for kind in TYPES}


def plain(value: Any) -> Any:
    """Replace what a test hands over by tuples, numbers, texts and the bytes of tensors, in host memory."""
    if isinstance(value, torch.Tensor):
        whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()).cpu()
        laid_out = tuple(value.shape), value.stride(), value.storage_offset()
        return "Tensor", whole.clone(), value.dtype, *laid_out, value.requires_grad
    if isinstance(value, Message):
        return "Message", plain(tuple(value)), value.weight_version
    if isinstance(value, Action):
        return "Action", value.stage, str(value.op.value), value.microbatch
    if type(value) in TYPES:
        fields = value if isinstance(value, tuple) else [getattr(value, name) for name in value.__slots__]
        return (type(value).__name__, *map(plain, fields))
    return ("tuple", *map(plain, value)) if isinstance(value, tuple | list) else value


def restored(value: Any, device: Device = CPU) -> Any:
    """Undo ``plain``, with tensors on a device."""
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind == "Tensor":
        whole, dtype, shape, strides, offset, learns = rest
        whole = whole[: len(whole) // dtype.itemsize * dtype.itemsize].to(device.place)
        return whole.view(dtype).as_strided(shape, strides, offset).requires_grad_(learns)
    fields = [restored(each, device) for each in rest]
    return TYPES[NAMES[kind]](*fields) if kind in NAMES else tuple(fields)


def put(connection: Connection, value: Any) -> None:
    file = io.BytesIO()
    torch.save(plain(value), file)
    connection.send_bytes(file.getvalue())


def taken(connection: Connection, device: Device = CPU) -> Any:
    return restored(torch.load(io.BytesIO(connection.recv_bytes()), weights_only=True), device)


class EndProcess:
    """A process with one end of every link that is opened.

    Args:
        device: "cpu" for gloo, "cuda" for NCCL.
        environment: variables of this process alone.
    """

    def __init__(self, device: str, environment: Mapping[str, str]) -> None:
        known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, "-m", "tests.contract.two_processes", device]
        self._process = subprocess.Popen(command, cwd=ROOT, env=known, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._at, self.address = "", None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._at, self.address = json.loads(line).values()
                break
        assert self._at, "the process of an end did not begin"
        threading.Thread(target=self._read_on, daemon=True).start()

    def _read_on(self) -> None:
        """Pass on what the process prints, as NCCL does with its warnings; a full pipe would stop it."""
        assert self._process.stdout is not None
        with suppress(ValueError):  # it was closed
            for line in self._process.stdout:
                print(line, end="", file=sys.stderr)

    def call(self, name: str, *arguments: Any, timeout_s: float = 2 * WAIT_S) -> Any:
        """Call a method of ``Served`` there, in a thread of its own; an error of raypipe is raised here."""
        with Client(self._at) as connection:
            put(connection, (name, *arguments))
            assert connection.poll(timeout_s), f"{name} did not end in {timeout_s:g} s"
            error, found = taken(connection)
        if error:
            raise getattr(errors, error, AssertionError)(found)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class RemoteEnd:
    """Channel of another process, as far as the contract uses one."""

    on_device = True  # tensors that arrive late cannot be handed over to another process

    def __init__(self, process: EndProcess, number: int) -> None:
        self._process, self._number = process, number
        self.name = process.call("get", number, "name")

    @property
    def form(self) -> FrameFormat:
        return self._process.call("get", self._number, "form")  # type: ignore[no-any-return]

    @form.setter
    def form(self, value: FrameFormat) -> None:
        self._process.call("set", self._number, "form", value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._process.call("do", self._number, name, *arguments)


class Served:
    """What a process does at a call: opens links, calls their channels, trains.

    Args:
        device: of this process's end.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.endpoint = device, ProcessGroupEndpoint(HOST, None, device)
        self._channels: dict[int, Any] = {}

    def open(self, number: int, me: int, address: str, generation: int, max_tensors: int) -> None:
        peer = 1 - me
        known = {"capacity": {peer: max_tensors}, "timeout_s": WAIT_S, "secret": b"secret"}
        names = {peer: f"stage {me} <-> stage {peer}"}
        opened = LinkSetup(me, {peer: json.loads(address)}, generation, "run", names=names, **known)  # type: ignore[arg-type]
        self._channels[number] = self.endpoint.open(opened)[peer]

    def get(self, number: int, name: str) -> Any:
        return getattr(self._channels[number], name)

    def set(self, number: int, name: str, value: Any) -> None:
        setattr(self._channels[number], name, value)

    def do(self, number: int, name: str, *arguments: Any) -> Any:
        with self.device.prepare_thread():
            return getattr(self._channels[number], name)(*arguments)

    def train(self, number: int, me: int) -> Any:
        """Train one half of a model against the other half over a link; return its weight."""
        channel, weight = self._channels[number], halves(self.device)[me]
        with self.device.prepare_thread():
            for m in range(STEPS):
                if me == 0:
                    hidden = first_half(self.device, m, weight)
                    channel.send(f(m), (hidden,))
                    (gradient,) = channel.recv(b(m), WAIT_S)
                    hidden.backward(gradient)
                else:
                    (hidden,) = channel.recv(f(m), WAIT_S)
                    second_half(hidden, weight).backward()
                    channel.send(b(m), (hidden.grad,))
                updated(weight)
            self.device.finish(self.device.mark(), "the last step")
        return weight.detach()

    def train_alone(self) -> Any:
        """Train both halves here; return their weights."""
        with self.device.prepare_thread():
            first, second = halves(self.device)
            for m in range(STEPS):
                hidden = first_half(self.device, m, first)
                given = hidden.detach().requires_grad_()
                second_half(given, second).backward()
                hidden.backward(given.grad)
                updated(first)
                updated(second)
            self.device.finish(self.device.mark(), "the last step")
        return first.detach(), second.detach()


def halves(device: Device) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    return [torch.randn(64, 64, generator=made).div(8).to(device.place).requires_grad_() for _ in range(2)]


def first_half(device: Device, step: int, weight: torch.Tensor) -> torch.Tensor:
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device.place)
    return (rows @ weight).tanh()


def second_half(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight).square().mean()


def updated(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None


def main(device: str) -> None:
    """Serve calls until the process is killed."""
    ProcessGroupEndpoint.refuses_shared_gpu = False
    served = Served(CPU if device == "cpu" else CudaDevice())
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/calls") as listener:
        print(json.dumps({"at": listener.address, "endpoint": served.endpoint.address}), flush=True)

        def answer(connection: Connection) -> None:
            with connection:
                name, *arguments = taken(connection, served.device)
                try:
                    put(connection, (None, getattr(served, name)(*arguments)))
                except Exception as error:  # noqa: BLE001  (the test shall see it)
                    put(connection, (type(error).__name__, str(error)))

        while True:
            threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()


class TwoProcesses(ChannelContract):
    """Inherit, and say which device the ends have. Tests of messages that take long are left to one process."""

    device = "cpu"
    test_one_gib = None  # type: ignore[assignment]
    test_large_messages_in_a_codec = None  # type: ignore[assignment]
    ends: tuple[EndProcess, EndProcess]
    opened = 0

    @staticmethod
    def environment(rank: int) -> Mapping[str, str]:
        """Return variables of the process of one end."""
        return {}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _processes(cls) -> Iterator[None]:
        made = list[EndProcess]()
        try:
            for rank in (0, 1):
                made.append(EndProcess(cls.device, cls.environment(rank)))
            cls.ends = made[0], made[1]
            yield
        finally:
            for end in made:
                end.close()

    def open_pair(self, max_tensors: int = 4) -> Pair:
        """Open a link of a new generation."""
        kind = type(self)
        kind.opened += 1
        number = kind.opened
        calls = [
            (end, ("open", number, me, json.dumps(self.ends[1 - me].address), number, max_tensors))
            for me, end in enumerate(self.ends)
        ]
        other = threading.Thread(target=lambda: calls[1][0].call(*calls[1][1]), daemon=True)
        other.start()
        calls[0][0].call(*calls[0][1])
        other.join(WAIT_S)
        return RemoteEnd(self.ends[0], number), RemoteEnd(self.ends[1], number)  # type: ignore[return-value]

    def test_two_hundred_steps_are_those_of_one_process(self, pair: Pair) -> None:
        found: list[Any] = [None, None]

        def train(me: int) -> None:
            found[me] = self.ends[me].call("train", type(self).opened, me)

        threads = [threading.Thread(target=train, args=(me,), daemon=True) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        for together, alone in zip(found, self.ends[0].call("train_alone"), strict=True):
            assert torch.equal(together, alone)
            assert not torch.equal(alone, halves(CPU)[0])

    def test_an_abort_amid_a_transfer_ends_both_sides_and_the_next_generation_works(self, pair: Pair) -> None:
        """The receiver has nobody to take messages out, so that some of them are on their way."""
        for m in range(1, 9):
            pair[0].send(f(m), (torch.ones(LARGE_ELEMENTS),))
        waits = [Failing(lambda: pair[1].recv(f(0), WAIT_S)), Failing(lambda: pair[0].recv(b(0), WAIT_S))]
        pair[0].abort("stage 7 died")
        waits[0].result()  # amid a payload the connection may end before the reason arrives
        assert "stage 7 died" in str(waits[1].result())
        with pytest.raises(LinkError, match="stage 7 died"):
            pair[0].send(f(9), (torch.ones(1),))
        for end in pair:
            end.close()
        first, second = self.open_pair()
        first.send(f(0), (torch.arange(10_000.0),))
        (got,) = second.recv(f(0), WAIT_S)
        assert torch.equal(got, torch.arange(10_000.0))  # type: ignore[arg-type]
        for end in (first, second):
            end.close()


if __name__ == "__main__":
    main(sys.argv[1])
