"""The contract of channels for links between two processes; each end is in a process that the test directs.

    test --calls, by name--> RemoteEnd ==connection==> process 0: channel <=== link ===> channel :process 1

Tensors go to and from the processes through host memory; each process moves them to its own device.
``python -m tests.contract.two_processes DEVICE TRANSPORT`` is such a process.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import errors
from raypipe.engine.codec import NONE, Codec
from raypipe.engine.codec.codec import CodedTensor
from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.messages.channel import Message, Stamp
from raypipe.engine.messages.frame import FrameFormat
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op
from raypipe.runtime.transport import make_endpoint
from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.process_group import ProcessGroupEndpoint
from tests.contract.channel import WAIT_S, ChannelContract, Failing, Pair, b, f, refused
from tests.emulators.cuda import Emulated
from tests.fake_device import FakeDevice
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
STEPS = 200
LARGE_ELEMENTS = 1 << 22
MEASURED_ELEMENTS = 1 << 20
TRIPS = 30
TYPES: Mapping[type, Callable[..., Any]] = {
    Action: lambda stage, op, microbatch: Action(stage, Op(op), microbatch),
    Codec: Codec,
    CodedTensor: CodedTensor,
    FrameFormat: FrameFormat,
    Message: lambda tensors, version: Message.of(tensors, version, Stamp()),
}
KERNELS = "RAYPIPE_TEST_KERNELS"
"""Variable with the file of the codecs' kernels, compiled for this processor, of a fake device."""
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


def on(device: Device, host: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of host memory to a device, for its computing stream."""
    (there,) = DeviceTransfer(device).to_device((host,), TransferKind.INPUTS)
    assert there is not None
    return there


def restored(value: Any, device: Device = CPU) -> Any:
    """Undo ``plain``, with tensors on a device, which must be the thread's."""
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind == "Tensor":
        whole, dtype, shape, strides, offset, learns = rest
        whole = on(device, whole[: len(whole) // dtype.itemsize * dtype.itemsize])
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
        device: "cpu", "cuda" or "fake".
        transport: see make_endpoint.
        environment: variables of this process alone.
    """

    def __init__(self, device: str, transport: str, environment: Mapping[str, str]) -> None:
        known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        command = [sys.executable, "-m", "tests.contract.two_processes", device, transport]
        self._process = subprocess.Popen(command, cwd=ROOT, env=known, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.pid = self._process.pid
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
        device, transport: of this process's end.
    """

    def __init__(self, device: Device, transport: str) -> None:
        self.device, self.endpoint = device, make_endpoint(transport, HOST, None, device)
        self._channels: dict[int, Any] = {}

    def open(self, number: int, me: int, address: str, generation: int, max_tensors: int, checksum: str) -> None:
        peer = 1 - me
        known = {"capacity": {peer: max_tensors}, "timeout_s": WAIT_S, "secret": b"secret", "checksum": checksum}
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
        channel, taken_in = self._channels[number], DeviceTransfer(self.device)
        with self.device.prepare_thread():
            weight = halves(self.device)[me]
            for m in range(STEPS):
                if me == 0:
                    hidden = first_half(self.device, m, weight)
                    channel.send(f(m), (hidden,))
                    (gradient,) = taken_in.message(channel.recv(b(m), WAIT_S), TransferKind.OUTPUT_GRADS)
                    hidden.backward(gradient)
                else:
                    (given,) = taken_in.message(channel.recv(f(m), WAIT_S), TransferKind.INPUTS)
                    assert given is not None
                    second_half(given, weight).backward()
                    channel.send(b(m), (given.grad,))
                updated(weight)
            self.device.finish(self.device.mark(), "the last step")
        return weight.detach()

    def measure(self, number: int, me: int) -> Any:
        """Send a message of 4 MiB to and fro; return half of the median round trip in seconds, and the tensor."""
        channel, transfer, trips_s = self._channels[number], DeviceTransfer(self.device), []
        with self.device.prepare_thread():
            x = on(self.device, torch.arange(MEASURED_ELEMENTS, dtype=torch.float32))
            for m in range(TRIPS):
                begin_s = time.monotonic()
                for sender, action in ((0, f(m)), (1, b(m))):
                    if me == sender:
                        kind = TransferKind.INPUT_GRADS
                        channel.send(action, transfer.outgoing(action, (x,), kind, NONE, on_device=channel.on_device))
                    else:
                        (x,) = transfer.message(channel.recv(action, WAIT_S), TransferKind.INPUTS)  # type: ignore[assignment]
                self.device.finish(self.device.mark(), "a round trip")
                trips_s.append(time.monotonic() - begin_s)
        return statistics.median(trips_s) / 2, x

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
    return [on(device, torch.randn(64, 64, generator=made).div(8)).requires_grad_() for _ in range(2)]


def first_half(device: Device, step: int, weight: torch.Tensor) -> torch.Tensor:
    rows = on(device, torch.randn(16, 64, generator=torch.Generator().manual_seed(step)))
    return (rows @ weight).tanh()


def second_half(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight).square().mean()


def updated(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None


def fake() -> Device:
    return FakeDevice(eager=False, kernels=Emulated(ctypes.CDLL(os.environ[KERNELS])))


def main(device: str, transport: str) -> None:
    """Serve calls until the process is killed."""
    ProcessGroupEndpoint.refuses_shared_gpu = False
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/calls") as listener:
        made: Mapping[str, Callable[[], Device]] = {"cpu": lambda: CPU, "cuda": CudaDevice, "fake": fake}
        served = Served(made[device](), transport)
        print(json.dumps({"at": listener.address, "endpoint": served.endpoint.address}), flush=True)

        def answer(connection: Connection) -> None:
            with connection:
                with served.device.prepare_thread():
                    name, *arguments = taken(connection, served.device)
                try:
                    put(connection, (None, getattr(served, name)(*arguments)))
                except Exception as error:  # noqa: BLE001  (the test shall see it)
                    put(connection, (type(error).__name__, str(error)))

        while True:
            threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()


class TwoProcesses(ChannelContract):
    """Inherit, and say which device the ends have. Tests of messages that take long are left to one process."""

    device, transport = "cpu", "collective"
    test_one_gib = None  # type: ignore[assignment]
    test_large_messages_in_a_codec = None  # type: ignore[assignment]
    ends: tuple[EndProcess, EndProcess]
    opened = 0

    @classmethod
    def environment(cls, rank: int) -> Mapping[str, str]:
        """Return variables of the process of one end."""
        return {}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _processes(cls) -> Iterator[None]:
        yield from cls.processes()

    @classmethod
    def processes(cls) -> Iterator[None]:
        made = list[EndProcess]()
        try:
            for rank in (0, 1):
                made.append(EndProcess(cls.device, cls.transport, cls.environment(rank)))
            cls.ends = made[0], made[1]
            yield
        finally:
            for end in made:
                end.close()

    def open_pair(
        self, max_tensors: int = 4, checksum: str = "auto", ends: tuple[EndProcess, EndProcess] | None = None
    ) -> Pair:
        """Open a link of a new generation, between ``self.ends`` if no others are given."""
        kind, ends = type(self), ends or self.ends
        kind.opened += 1
        number = kind.opened
        calls = [
            (end, ("open", number, me, json.dumps(ends[1 - me].address), number, max_tensors, checksum))
            for me, end in enumerate(ends)
        ]
        other = threading.Thread(target=lambda: calls[1][0].call(*calls[1][1]), daemon=True)
        other.start()
        calls[0][0].call(*calls[0][1])
        other.join(WAIT_S)
        return RemoteEnd(ends[0], number), RemoteEnd(ends[1], number)  # type: ignore[return-value]

    def test_two_hundred_steps_are_those_of_one_process(self, pair: Pair) -> None:
        for together, alone in zip(self.both("train"), self.ends[0].call("train_alone"), strict=True):
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

    def both(self, name: str) -> list[Any]:
        """Call a method of ``Served`` at both ends of the newest link; return its results."""
        found: list[Any] = [None, None]

        def call(me: int) -> None:
            found[me] = self.ends[me].call(name, type(self).opened, me)

        threads = [threading.Thread(target=call, args=(me,), daemon=True) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        return found


class DeviceMemoryBetweenProcesses(TwoProcesses):
    """Links of "auto" between two devices of one host that share memory."""

    transport = "auto"

    def test_payloads_stay_on_the_devices(self, pair: Pair) -> None:
        assert [self.ends[me].call("get", type(self).opened, "on_device") for me in (0, 1)] == [True, True]

    def test_with_checksums_payloads_go_through_the_host(self) -> None:
        pair = self.open_pair(checksum="on")
        assert [self.ends[me].call("get", type(self).opened, "on_device") for me in (0, 1)] == [False, False]
        for end in pair:
            end.close()

    def test_a_killed_peer_leaves_no_wait_and_no_file(self) -> None:
        peer = EndProcess(self.device, self.transport, self.environment(1))
        try:
            pair = self.open_pair(ends=(self.ends[0], peer))
            for m in range(8):  # of which some are on their way, or only begun on the device
                pair[0].send(f(m), (torch.ones(LARGE_ELEMENTS),))
                pair[1].send(b(m), (torch.ones(LARGE_ELEMENTS),))
        finally:
            peer.close()
        with pytest.raises(LinkError):
            pair[0].recv(b(8), WAIT_S)
        wait_until(lambda: refused(pair[0], f(8)) is not None)
        pair[0].close()
        assert [path.name for path in Path("/dev/shm").iterdir() if f"_{peer.pid}_" in path.name] == []
        first, second = self.open_pair()
        first.send(f(0), (torch.arange(10_000.0),))
        assert torch.equal(second.recv(f(0), WAIT_S)[0], torch.arange(10_000.0))  # type: ignore[arg-type]
        for end in (first, second):
            end.close()

    @pytest.mark.parametrize("checksum", ["auto", "on"])
    def test_a_message_of_4_mib_is_measured(self, record_property: Any, checksum: str) -> None:
        """With "on" through the host's memory, for comparison; pytest writes the figure into its report."""
        pair = self.open_pair(checksum=checksum)
        (seconds, back), _ = self.both("measure")
        record_property("microseconds of a 4 MiB message", round(seconds * 1e6, 1))
        print(f"4 MiB, checksum={checksum}: {seconds * 1e6:.1f} us")
        assert torch.equal(back, torch.arange(MEASURED_ELEMENTS, dtype=torch.float32))
        for end in pair:
            end.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
