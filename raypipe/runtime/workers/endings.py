"""In words: how the process of a stage ended, and what to do about it."""

from __future__ import annotations

from raypipe.errors import LESS_MEMORY
from raypipe.ir.plan import human_bytes
from raypipe.runtime.workers.processes import Ended

__all__ = ["ending", "ran_out_bytes"]

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")

_MONITOR = "running low on memory"
"""Words of Ray's memory monitor."""


def ran_out_bytes(ended: Ended | None, said: str) -> int | None:
    """What a process held that was ended because there was no memory left, 0 unknown; None where that is not why.

    Args:
        ended, said: as in ``ending``.
    """
    if _MONITOR in said:
        return 0 if ended is None else ended.resident_bytes
    return ended.resident_bytes if ended is not None and ended.out_of_memory else None


def ending(ended: Ended | None, said: str, host: str) -> str:
    """The rest of a sentence that begins with the stage's name, and what to do.

    Args:
        ended: what the kernel of its node told; None where nobody could be asked.
        said: what Ray says of the actor's death.
        host: of its node.
    """
    if _MONITOR in said:
        return f"was killed by Ray's memory monitor on {host}, which ran out of memory. {LESS_MEMORY}"
    if ended is None:
        if "node has died" in said or "node died" in said:
            return f"was lost with its node {host}: Ray has not heard of it any more. Look at that machine."
        return f"died on {host}: {_first_line(said)}"
    if ended.out_of_memory:
        return (
            f"was killed by the kernel's OOM killer on {host} while it held {human_bytes(ended.resident_bytes)}: there "
            f"was no memory left. {LESS_MEMORY}"
        )
    if ended.signal == "SIGKILL":
        return (
            f"was killed by SIGKILL on {host}, and not by the kernel's OOM killer: somebody, or something such as a "
            "scheduler's limit or the node's shutdown, ended it. Look who did."
        )
    if ended.signal in _CRASHES:
        return (
            f"crashed with {ended.signal} on {host}: native code of the model or of a library is at fault. Ray's log "
            "of that process (worker-*.err in its session's logs) has the stack."
        )
    if ended.signal:
        return f"was ended by {ended.signal} on {host}. Look who sent it."
    if ended.status is not None:
        return (
            f"exited with status {ended.status} on {host}: something in it called exit, or Ray ended it "
            f"({_first_line(said)})"
        )
    return f"died on {host}: {_first_line(said)}"


def _first_line(said: str) -> str:
    """What Ray says of the cause: the line after its list of names, or the first one."""
    for line in said.splitlines():
        if not line.startswith(("\t", "The actor died unexpectedly")):
            return line.strip()
    return (said.splitlines() or ["nobody knows why."])[0].strip()
