"""A run whose messages go through shared memory: the bits of one over sockets, with a stage killed too."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer
from raypipe.runtime.transport.shared_memory import SHARED_BYTES
from tests.exactness import unequal
from tests.trainers import trainer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, SAMPLES, WIDTH = 12, 64, 4096


def noting_adamw(parameters: Any, *, folder: Path, here: int) -> torch.optim.Optimizer:
    """AdamW, which every stage makes in its process; the process notes its number."""
    if os.getpid() != here:
        (folder / f"stage-{os.getpid()}").touch()
    return torch.optim.AdamW(parameters, lr=1e-2)


def wide(folder: Path, run: str, **pipeline: Any) -> PipelineTrainer:
    """Two stages that exchange 1 MiB per micro-batch and direction."""
    drawn = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(2 * SAMPLES, 8, generator=drawn), torch.randint(0, 4, (2 * SAMPLES,), generator=drawn)
    )
    torch.manual_seed(0)
    return trainer_of(
        nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)), folder, run,
        loss_fn=nn.functional.cross_entropy, train_data=data,
        optimizer=partial(noting_adamw, folder=folder, here=os.getpid()),
        **{"num_stages": 2, "partitioner": ("2",), "minibatch_size": 2 * SAMPLES,
           "num_microbatches": 2, **pipeline},
    )  # fmt: skip


def shared_bytes(pid: int) -> int:
    """Return the bytes of segments that a process has touched."""
    lines, found = Path(f"/proc/{pid}/smaps").read_text().splitlines(), 0
    for number, line in enumerate(lines):
        if "memfd:raypipe-link" in line:
            found += next(int(below.split()[1]) for below in lines[number:] if below.startswith("Rss:")) << 10
    return found


class Watch:
    """Looks at the stages of a run at every step: bytes of segments that each has touched; kills one halfway.

    Attributes:
        touched: by number of the process.
    """

    def __init__(self, folder: Path) -> None:
        self.touched: dict[int, int] = {}
        self._folder, self._killed = folder, False

    def __call__(self, news: Any) -> None:
        for pid in (int(path.name.removeprefix("stage-")) for path in self._folder.glob("stage-*")):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self.touched[pid] = max(self.touched.get(pid, 0), shared_bytes(pid))
                if not self._killed and news.status.step >= STEPS // 2:
                    self._killed = True
                    os.kill(pid, signal.SIGKILL)


def test_the_bits_of_sockets_and_a_killed_stage(local_ray: None, tmp_path: Path) -> None:
    """The stages of "auto" touch segments, those of "tcp" none; one is killed, and recovery shares memory again."""
    assert SAMPLES * WIDTH * 4 >= SHARED_BYTES
    results, touched = {}, {}
    for transport in ("auto", "tcp"):
        (tmp_path / transport).mkdir()
        made, watch = wide(tmp_path / transport, transport, transport=transport), Watch(tmp_path / transport)
        made._run.failure_config = SimpleNamespace(max_failures=1)
        results[transport] = made.start(STEPS).wait(timeout_s=240, on_news=watch)
        print(transport, watch.touched)
        assert len(watch.touched) == 3, "two stages, and one in place of the killed one"
        touched[transport] = watch.touched.values()
    assert unequal(results["auto"].checkpoint, results["tcp"].checkpoint) == []
    assert [record.loss for record in results["auto"].records] == [record.loss for record in results["tcp"].records]
    assert set(touched["tcp"]) == {0}
    assert min(touched["auto"]) >= SHARED_BYTES
