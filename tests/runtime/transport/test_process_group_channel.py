"""Links whose payloads go through groups, over pipes for want of two GPUs: the contract of channels."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch

from raypipe.engine.device.device import CPU
from raypipe.engine.messages.frame import FrameFormat
from raypipe.engine.messages.record import raw_bytes
from raypipe.errors import ConfigError
from raypipe.runtime.transport import make_endpoint
from raypipe.runtime.transport.process_group import why_no_nccl
from raypipe.runtime.transport.process_group_channel import DeviceGroupChannel
from raypipe.runtime.transport.socket_channel import Connections
from tests.contract.channel import WAIT_S, ChannelContract, Pair, f
from tests.fake_device import FakeDevice

pytestmark = pytest.mark.engine


class PipeGroup:
    """PayloadGroup over a pair of sockets: bytes one way, and an abort that ends waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[PipeGroup, PipeGroup]:
        """(the end that sends, the end that receives)."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def send(self, payload: torch.Tensor) -> None:
        try:
            self._sock.sendall(raw_bytes(payload, payload.numel()))
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def recv(self, payload: torch.Tensor) -> None:
        view = raw_bytes(payload, payload.numel())
        while view.nbytes:
            try:
                got = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not got:
                raise ConnectionError("the other end was given up")
            view = view[got:]

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


_OPEN: list[PipeGroup] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def open_link(max_tensors: int = 4) -> Pair:
    """Both ends of a link with two connections and two groups."""
    ahead, back = socket.socketpair(), socket.socketpair()
    for sock in (*ahead, *back):
        sock.setblocking(True)
    there, return_way = PipeGroup.pair(), PipeGroup.pair()
    _OPEN.extend((*there, *return_way))
    ends = Connections("link", FrameFormat(3, max_tensors), ahead[0], back[1])
    first = DeviceGroupChannel(ends, (there[0], return_way[1]), CPU)
    second = DeviceGroupChannel(ends._replace(outgoing=back[0], incoming=ahead[1]), (return_way[0], there[1]), CPU)
    return first, second


class TestDeviceGroupChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors)


def test_where_there_is_no_nccl_the_field_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = FakeDevice(eager=False)  # a device that is not the CPU
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"transport='collective': torch .* is built without NCCL.*transport='tcp'"):
        make_endpoint("collective", "127.0.0.1", None, elsewhere)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 18, 5))
    assert "NCCL 2.18.5, whose links cannot be aborted" in why_no_nccl()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert why_no_nccl() == ""


def test_payloads_stay_off_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only headers are written there, of one size for every message."""
    first, second = open_link()
    try:
        written: list[int] = []
        write = type(first).write
        monkeypatch.setattr(
            type(first), "write", lambda end, header: (written.append(len(header)), write(end, header))[1]
        )
        for m, size in enumerate((0, 5, 70_000)):
            first.send(f(m), (torch.full((size,), float(m)),))
            (got,) = second.recv(f(m), WAIT_S)
            assert got is not None
            assert got.tolist() == [float(m)] * size
        assert len(set(written)) == 1
        assert len(written) == 3
    finally:
        first.close()
        second.close()
