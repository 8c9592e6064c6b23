"""Memory that runs out in a stage: what says so, and what the error knows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from raypipe.engine.device.device import held_bytes, memory_bytes, ran_out
from raypipe.errors import RanOut, StageError
from tests.mishaps import Crowd
from tests.models import vectors
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_which_errors_say_so(error: Exception, found: bool) -> None:
    assert ran_out(error) is found


def test_hosts_without_room_for_a_tensor_say_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert ran_out(caught.value)
    assert held_bytes(caught.value) > 1 << 20


@pytest.mark.slow
def test_the_error_names_stage_action_and_bytes_and_knows_the_worker(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), Crowd("full", 2))
    fields = {"num_microbatches": 8, "partitioner": ("2",), "schedule": "gpipe"}
    trainer = trainer_of(model, tmp_path, "full", train_data=vectors(8), **fields)
    with pytest.raises(
        StageError, match=r"^Stage 1 ran out of memory in 1F2, with .*[MG]iB in use: MemoryError"
    ) as caught:
        trainer.fit(1, local=True, progress=False)
    assert isinstance(caught.value.ran_out, RanOut)
    assert caught.value.ran_out.worker == 1


def test_a_process_may_hold_what_its_container_may(tmp_path: Path) -> None:
    own, whole = tmp_path / "own", memory_bytes(tmp_path, tmp_path / "nothing")
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own.write_text("3:cpu:/\n0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/memory.max").write_text("max\n")
    assert memory_bytes(tmp_path, own) == whole
    (tmp_path / "a/b/memory.max").write_text("1000000\n")
    assert memory_bytes(tmp_path, own) == 1_000_000
    own.write_text("4:cpu,memory:/c\n")
    (tmp_path / "memory/c").mkdir(parents=True)
    (tmp_path / "memory/c/memory.limit_in_bytes").write_text("2000000\n")
    assert memory_bytes(tmp_path, own) == 2_000_000
