"""A run whose messages go through shared memory: the bits of one over sockets, with a stage killed too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer
from raypipe.api.handle import RunHandle
from raypipe.runtime.transport.shared_memory import SHARED_BYTES
from tests.exactness import unequal
from tests.runtime.fleet.test_recovery import kill, reached
from tests.trainers import trainer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, SAMPLES, WIDTH = 100, 64, 4096


def wide(folder: Path, run: str, **pipeline: Any) -> PipelineTrainer:
    """Two stages that exchange 1 MiB per micro-batch and direction."""
    drawn = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(2 * SAMPLES, 8, generator=drawn), torch.randint(0, 4, (2 * SAMPLES,), generator=drawn)
    )
    torch.manual_seed(0)
    made = trainer_of(
        nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)), folder, run,
        loss_fn=nn.functional.cross_entropy, train_data=data,
        **{"num_stages": 2, "partitioner": ("2",), "minibatch_size": 2 * SAMPLES, "num_microbatches": 2, **pipeline},
    )  # fmt: skip
    made._run.failure_config = SimpleNamespace(max_failures=1)
    return made


def touched(handle: RunHandle) -> dict[int, int]:
    """Return the bytes of segments that each stage has touched, by number of its process."""
    found = {}
    for pid in (stage["process"] for stage in handle.status().stages):
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        segments = [number for number, line in enumerate(lines) if "memfd:raypipe-link" in line]
        sizes = [next(int(below.split()[1]) for below in lines[at:] if below.startswith("Rss:")) for at in segments]
        found[pid] = sum(sizes) << 10
    return found


def test_the_bits_of_sockets_and_a_killed_stage(local_ray: None, tmp_path: Path) -> None:
    """The stages of "auto" touch segments, those of "tcp" none; one is killed, and recovery shares memory again."""
    assert SAMPLES * WIDTH * 4 >= SHARED_BYTES
    results, sizes = {}, {}
    for transport in ("auto", "tcp"):
        handle = wide(tmp_path, transport, transport=transport).start(STEPS)
        reached(handle, STEPS // 5)
        before = touched(handle)
        kill(handle, 0)
        reached(handle, STEPS // 2)
        after = touched(handle)
        assert len({*before, *after}) == 3, "two stages, and one in place of the killed one"
        sizes[transport] = [*before.values(), *after.values()]
        results[transport] = handle.wait(timeout_s=240)
    assert unequal(results["auto"].checkpoint, results["tcp"].checkpoint) == []
    assert [record.loss for record in results["auto"].records] == [record.loss for record in results["tcp"].records]
    assert set(sizes["tcp"]) == {0}
    assert min(sizes["auto"]) >= SHARED_BYTES
