"""A group of the kind that device links need, over a pair of sockets: bytes one way, and an abort that ends waits."""

from __future__ import annotations

import contextlib
import socket

import torch

from raypipe.engine.messages.layout import raw_bytes

__all__ = ["PipeGroup"]


class PipeGroup:
    """One end; see PayloadGroup."""

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
