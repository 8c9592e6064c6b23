"""raypipe.hf.PipelinedTrainer on Ray: a killed stage and another number of stages change nothing of what is trained."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.train import FailureConfig

import raypipe
from tests.exactness import unequal

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from raypipe.hf import PipelinedTrainer  # noqa: E402
from tests.runs.test_pipelined_trainer import bert, history, parameters, texts, trainer_of  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLE_S = 0.005
"""Without it a quick machine ends the run before the callback has done its harm."""


class Slow:
    """Rows that take a while to read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        time.sleep(SAMPLE_S)
        return self.rows[row]


def kill(handle: raypipe.RunHandle) -> None:
    os.kill(handle.status().stages[1]["process"], signal.SIGKILL)


def grow(handle: raypipe.RunHandle) -> None:
    handle.resize(3)


class Harms(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that does something to the run after a step."""

    def __init__(self, harm: Callable[[raypipe.RunHandle], None]) -> None:
        self.harm = harm

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            self.harm(raypipe.attach(str(Path(args.output_dir, "raypipe"))))


@pytest.mark.parametrize(("harm", "event"), [(kill, "recovery"), (grow, "resize")])
def test_a_run_that_is_disturbed_equals_the_undisturbed_one(
    local_ray: None, tmp_path: Path, harm: Callable[[raypipe.RunHandle], None], event: str
) -> None:
    """With an evaluation and a checkpoint before and after, in threads for the undisturbed one."""
    rows, held = texts(64, classes=3, longest=6), texts(8, classes=3)
    more = {"eval_strategy": "steps", "eval_steps": 8, "save_strategy": "steps", "save_steps": 8}
    alone = trainer_of(PipelinedTrainer, tmp_path / "alone", bert(), rows, held, **more)
    alone.train()
    disturbed = trainer_of(
        PipelinedTrainer, tmp_path / "disturbed", bert(), Slow(rows), held, local=False, callbacks=[Harms(harm)],
        failure_config=FailureConfig(max_failures=1), **more,
    )  # fmt: skip
    disturbed.train()
    assert history(disturbed) == history(alone)
    assert unequal(parameters(disturbed), parameters(alone)) == []
    lines = (tmp_path / "disturbed" / "raypipe" / "events.jsonl").read_text().splitlines()
    assert event in {json.loads(line)["decision"] for line in lines}
