"""A trainer's run on Ray actors: the files that it leaves, and the same bits as in threads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from raypipe import PipelineTrainer, load_state_dict
from raypipe.planner.controller import Verdict
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.testing import reference
from tests.exactness import same_bits, unequal
from tests.models import CASES
from tests.prepare.test_resume import trainer
from tests.runs.test_nonfinite import BAD, arguments, traced
from tests.runtime.on_fleet import start_on

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]

STEPS = 6


def test_a_run_on_ray_is_the_run_in_threads(fleet: Fleet, tmp_path: Path) -> None:
    made = [trainer("cnn", tmp_path, name, 2, eval_data=CASES["cnn"].data(13)) for name in ("threads", "actors")]
    threads = made[0].fit(num_steps=STEPS, local=True, progress=False)
    actors = start_on(fleet, made[1], STEPS).wait()
    assert [(r.loss, r.grad_norm) for r in actors.records] == [(r.loss, r.grad_norm) for r in threads.records]
    assert actors.metrics["eval_loss"] == threads.metrics["eval_loss"]
    ours, theirs = load_state_dict(tmp_path / "actors"), load_state_dict(tmp_path / "threads")
    assert ours.keys() == theirs.keys() == CASES["cnn"].model().state_dict().keys()
    assert unequal(ours, theirs) == []
    check_folder(tmp_path / "actors", actors)


def check_folder(folder: Path, result: Any) -> None:
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} >= {
        "plan.json",
        "config.yaml",
        "events.jsonl",
        "metrics.parquet/steps_0000000000.parquet",
        "timeline/trace.json",
        "timeline/spans.parquet",
        f"checkpoints/step_{STEPS:07d}/manifest.json",
        f"checkpoints/step_{STEPS:07d}/stage_0.safetensors",
        f"checkpoints/step_{STEPS:07d}/stage_0.optimizer.safetensors",
        f"checkpoints/step_{STEPS:07d}/stage_1.safetensors",
    }
    assert (result.path, result.checkpoint) == (str(folder), str(folder / f"checkpoints/step_{STEPS:07d}"))
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    assert [(row["step"], row["loss"]) for row in rows] == [(r.step, r.loss) for r in result.records]
    assert [row["samples"] for row in rows] == [8, 8, 3, 8, 8, 3]
    assert all(row["seconds"] > 0 and 0 <= row["bubble_fraction"] < 1 and row["link_bytes_per_s"] > 0 for row in rows)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    own = [event["decision"] for event in events if event["decision"] not in set(Verdict)]
    assert own == ["start", "evaluate", "checkpoint", "finish"], "besides what the controller says"
    assert json.loads((folder / "plan.json").read_text())["schedule"]["kind"].startswith("slack")
    trace = json.loads((folder / "timeline/trace.json").read_text())
    spans = trace["traceEvents"] if isinstance(trace, dict) else trace
    named = [event["args"]["name"] for event in spans if event.get("name") == "process_name"]
    assert [name.split()[0] for name in named] == ["simulated", "measured"]


@pytest.mark.parametrize("schedule", ["slack", "zb-h1"])
def test_steps_are_skipped_on_all_actors(schedule: str, fleet: Fleet, tmp_path: Path) -> None:
    given = arguments(traced, BAD, float("nan"), schedule=schedule)
    expected = reference(**given, num_steps=STEPS)
    run = SimpleNamespace(name="run", storage_path=str(tmp_path))
    made = PipelineTrainer(given.pop("model"), **given, run_config=run)
    result = start_on(fleet, made, STEPS).wait()
    assert tuple(record.step for record in result.records if record.skipped) == expected.skipped == BAD
    assert [repr(record.loss) for record in result.records] == list(map(repr, expected.losses))
    state = load_state_dict(tmp_path / "run")
    assert [name for name in state if not same_bits(state[name], expected.parameters[name])] == []
