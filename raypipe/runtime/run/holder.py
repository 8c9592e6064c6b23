"""Who holds a run's folder: a process, named so that another one on the same machine can tell whether it lives."""

from __future__ import annotations

import functools
import os
import platform
import secrets
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Holder", "myself"]

_HERE: set[str] = set()
"""Ids of the leases that this process holds: one of an earlier call that is none of these is over."""


class Holder(NamedTuple):
    """A process that trains a run.

    Attributes:
        host: its name, for people.
        machine: boot and process namespace; the same text means that process ids mean the same.
        pid, started: process id, and when the kernel says that it began: ids are used again.
        id: of this very lease.
    """

    host: str
    machine: str
    pid: int
    started: str
    id: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def of(cls, found: Any) -> Holder:
        """From its JSON.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        return cls(
            str(found["host"]), str(found["machine"]), int(found["pid"]), str(found["started"]), str(found["id"])
        )

    @property
    def is_gone(self) -> bool:
        """Whether it is known to be over; a process of another machine never is."""
        if not self.machine or self.machine != _machine():
            return False
        if self.pid == os.getpid() and self.started == _started(self.pid):
            return self.id not in _HERE
        return _started(self.pid) != self.started

    def begins(self) -> None:
        """This process holds a lease under this id from now on..."""
        _HERE.add(self.id)

    def ends(self) -> None:
        """... until now."""
        _HERE.discard(self.id)


def myself() -> Holder:
    """This process, with a new id."""
    pid = os.getpid()
    return Holder(platform.node() or "unknown", _machine(), pid, _started(pid), secrets.token_hex(8))


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks since the boot; empty where none of this id lives."""
    try:
        # The name in parentheses may hold anything, so fields count from the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@functools.cache
def _machine() -> str:
    """Empty where there is no such thing to read: then nobody is taken for dead before its time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
