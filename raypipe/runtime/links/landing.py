"""Landing: memory that a message is received into, and how large memory is used again.

    take() --> lease --> tensors of the stage, autograd's saved views, ...
      ^                           | the last of them is gone, and the lease with it
      +------ free blocks <-------+

Memory of up to 32 MiB the C library itself hands out again. Larger memory it returns to the system, and the
next message pays for fresh pages: measured, 60 % of the time to receive 64 MiB. So large blocks are kept here.

A block is free when the *storage* over it is gone, whatever held it: a tensor, a view, a graph. torch tells
through its public interface: a storage made by ``torch.frombuffer`` holds a reference to the object that it
was made from, the lease, until it ends, and a finalizer sees the lease end.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import NamedTuple

import torch

from raypipe.engine.messages import frame, layout

__all__ = ["REUSE_BYTES", "Landing", "Memory"]

REUSE_BYTES = (32 << 20) + 1
"""Smallest payload whose memory is used again: glibc's largest threshold for returning memory is 32 MiB."""

KEPT_BLOCKS = 2
"""Free blocks that one direction of a link keeps; in a steady pipeline one is filled while another is let go."""


class Memory:
    """Memory for the payloads of one direction of a link.

    Args:
        reuse_bytes: payloads from this size on get memory that was used before, if there is some.
        kept_blocks: most blocks that are kept free.
    """

    def __init__(self, reuse_bytes: int = REUSE_BYTES, kept_blocks: int = KEPT_BLOCKS) -> None:
        self._reuse_bytes = reuse_bytes
        # Finalizers put blocks here, from any thread and at any time, also inside take(): so there is no lock,
        # only single steps that are whole. The oldest free block leaves when there are too many.
        self._free: deque[torch.Tensor] = deque(maxlen=kept_blocks)

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of ``nbytes`` that nobody else uses, at a multiple of 64 bytes; not resizable if reused."""
        if nbytes < self._reuse_bytes:
            return torch.empty(nbytes, dtype=torch.uint8)
        block = self._pop(nbytes)
        if block is None:
            block = torch.empty(nbytes, dtype=torch.uint8)
        lease = (ctypes.c_ubyte * nbytes).from_address(block.data_ptr())
        weakref.finalize(lease, self._free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _pop(self, nbytes: int) -> torch.Tensor | None:
        """A free block that fits; those that are too small, or more than twice too large, are let go."""
        while self._free:
            try:
                block = self._free.pop()
            except IndexError:
                break
            if nbytes <= block.numel() <= 2 * nbytes:
                return block
        return None


class Landing(NamedTuple):
    """Memory to receive a message into, made before its contents arrive, and so are its tensors where they lie in it.

    A message in a codec is received into memory that nobody sees, and becomes tensors when it has come.
    """

    records: tuple[frame.TensorRecord | None, ...]
    memory: memoryview
    payload: torch.Tensor
    tensors: tuple[torch.Tensor | None, ...] | None

    @classmethod
    def prepare(cls, head: frame.Head, memory: Memory) -> Landing:
        """Room for a message like ``head``."""
        coded = frame.is_coded(head)
        payload = torch.empty(head.payload_bytes, dtype=torch.uint8) if coded else memory.take(head.payload_bytes)
        tensors = None if coded else frame.decode(head, payload)
        return cls(head.records, layout.raw_bytes(payload, head.payload_bytes), payload, tensors)

    def landed(self, head: frame.Head, memory: Memory, *, coded: bool = False) -> tuple[torch.Tensor | None, ...]:
        """The tensors, now that all bytes are here; once.

        Args:
            coded: see ``frame.decode``.
        """
        if self.tensors is not None:
            return self.tensors
        return frame.decode(head, self.payload, memory.take, coded=coded)
