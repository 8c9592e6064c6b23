"""An optimizer that watches its stage: processor time, resident memory, or the gradients of every step.

It is ordinary user code, called by every stage in its own process at the end of every step, so it sees a stage from
outside the model and needs nothing of raypipe. One line of JSON per step goes to ``<folder>/<process>.jsonl``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Watch", "read_lines", "stage_key"]


class Watch:
    """Makes optimizers of a class that watch; in the process where the Watch was made they do not.

    Args:
        base, options: the optimizer.
        folder: where the lines go.
        what: "seconds", "bytes" or "bits".
    """

    def __init__(self, base: type[torch.optim.Optimizer], options: dict[str, Any], folder: Path, what: str) -> None:
        self.base, self.options, self.folder, self.what = base, options, folder, what
        self.home = os.getpid()

    def __call__(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = self.base(named, **self.options)
        if os.getpid() != self.home:
            _Stage(made, named, self.folder, self.what)
        return made


class _Stage:
    """Stands around one optimizer's step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.nn.Parameter]], folder: Path, what: str
    ) -> None:
        self.named, self.folder, self.what = named, folder, what
        self.file = folder / f"{os.getpid()}.jsonl"
        self.optimizer = optimizer
        self.steps = 0
        self.ended_s = 0.0
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, *given: Any) -> None:
        self.line: dict[str, Any] = {"stage": stage_key(name for name, _ in self.named)}
        if self.what == "bits":
            grads = {name: p.grad for name, p in self.named}
            torch.save(grads, self.folder / f"{os.getpid()}-{self.steps}.pt")
            return
        reached_s = time.thread_time()
        for parameter in dict(self.named).values():
            if parameter.grad is not None:
                torch.linalg.vector_norm(parameter.grad)
        norm_s = time.thread_time() - reached_s
        self.line |= {"busy_s": reached_s - self.ended_s - norm_s, "norm_s": norm_s, "at": _memory()}
        self.began_s = time.thread_time()

    def after(self, *given: Any) -> None:
        if self.what != "bits":
            self.line |= {
                "step_s": time.thread_time() - self.began_s,
                "end": _memory(),
                "held_bytes": self.held_bytes(),
            }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.line) + "\n")
        if self.what == "bytes":
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins anew
        self.steps += 1
        self.ended_s = time.thread_time()

    def held_bytes(self) -> int:
        """Of what lives from step to step and the optimizer can see: parameters, gradients, its own state."""
        tensors = [p for _, p in self.named] + [p.grad for _, p in self.named if p.grad is not None]
        kept = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return sum(tensor.nbytes for tensor in (*tensors, *kept))


def stage_key(names: Iterable[str]) -> str:
    """Tells stages apart by what they train; a tied parameter may be the first of several."""
    return " ".join(sorted(names))


def _memory() -> dict[str, int]:
    """Of this process, in bytes: resident and its parts, and the high-water mark."""
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def read_lines(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of every stage, by ``stage_key``."""
    found = {}
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[lines[0]["stage"]] = lines
    return found
