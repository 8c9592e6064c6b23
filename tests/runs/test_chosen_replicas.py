"""A run whose number of replicas is left to the planner has the plan that was chosen, and goes on in the same lanes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from tests.exactness import same_bits
from tests.runs.test_replicas import net, told, trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

OPEN = {
    "num_replicas": "auto", "num_stages": "auto", "partitioner": "auto", "num_microbatches": "auto",
    "minibatch_size": 24, "profile_budget_s": 0.01,
}  # fmt: skip


def kept_plan(folder: Path) -> Plan:
    return Plan.from_json((folder / "plan.json").read_text())


def test_the_chosen_plan_runs_and_another_run_has_its_bits(tmp_path: Path) -> None:
    trainer(tmp_path, "chosen", **OPEN).fit(num_steps=4, local=True, progress=False)
    plan = kept_plan(tmp_path / "chosen")
    assert {(2,), (1, 1)} <= {each.workers for each in plan.candidates}
    (chosen,) = (each for each in plan.candidates if each.chosen)
    assert chosen.workers == plan.partition.replicas
    given = {
        "num_stages": plan.partition.num_stages, "num_replicas": list(plan.partition.replicas),
        "num_lanes": plan.schedule.wiring.lanes, "num_microbatches": plan.num_microbatches, "minibatch_size": 24,
    }  # fmt: skip
    trainer(tmp_path, "given", **given).fit(num_steps=4, local=True, progress=False)
    (rows, one), (others, two) = told(tmp_path / "chosen"), told(tmp_path / "given")
    assert [row[:2] for row in rows] == [row[:2] for row in others]
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_a_run_goes_on_in_its_lanes_whatever_would_be_chosen_today(tmp_path: Path) -> None:
    """Two lanes where nothing is replicated: the planner would choose one for a pipeline."""
    trainer(tmp_path, "kept", num_lanes=2, num_microbatches=4, minibatch_size=24).fit(
        num_steps=2, local=True, progress=False
    )
    trainer(tmp_path, "kept", **OPEN).fit(num_steps=4, local=True, progress=False)
    plan = kept_plan(tmp_path / "kept")
    assert plan.schedule.wiring.lanes == 2
    assert max(plan.partition.replicas) <= 2
    config = json.loads((tmp_path / "kept" / "plan.json").read_text())
    assert config["num_microbatches"] == 4


def test_what_changes_buffers_is_not_replicated_and_the_table_says_so(tmp_path: Path) -> None:
    plan = trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), **OPEN).plan()
    assert plan.partition.replicas == (1, 1)
    refused = {each.workers: each.refused for each in plan.candidates}
    assert refused[2,] == "a stage with several workers would change buffers in every forward"
    assert "  data parallelism  " in str(plan)
    with pytest.raises(PlanError, match="in every forward, so that its 2 replicas"):
        trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), num_stages=1, num_replicas=2).plan()


def test_stages_that_begin_at_named_modules_have_replicas_on_the_workers_that_are_offered(tmp_path: Path) -> None:
    """Stages are counted by the modules then, not by workers."""
    made = trainer(tmp_path, "named", num_stages="auto", partitioner=("3",), num_replicas=[2, 1])
    made._scaling = SimpleNamespace(num_workers=3)
    assert made.plan().partition.replicas == (2, 1)


def test_fields_for_replicas_that_the_chosen_plan_has_no_use_for_are_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, "single", **OPEN, replicated_buffers=True, codec_sums="bf16")
    made._scaling = SimpleNamespace(num_workers=1)
    notes = " ".join(made.plan().notes)
    assert "replicated_buffers=True changes nothing" in notes
    assert "codec_sums changes nothing" in notes
