"""``raypipe plan`` and ``raypipe profile``: a run file goes in, a plan that fits comes out, and Ray stays away."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.cli import app
from raypipe.errors import PlanError, RaypipeError
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile

pytestmark = pytest.mark.engine

TASK = """\
import torch

class Net(torch.nn.Sequential):
    def __init__(self, width, depth):
        layers = [torch.nn.Linear(8, width)]
        for _ in range(depth):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        super().__init__(*layers)

def data(count):
    return torch.utils.data.TensorDataset(torch.randn(count, 8), torch.randn(count, 32))
"""
CONFIG = """\
model: {target: "TASK:Net", args: {width: 32, depth: 5}}
loss_fn: {target: "torch.nn:MSELoss"}
optimizer: {target: "torch.optim:SGD", args: {lr: 1e-1, momentum: 0.9}}
train_data: {target: "TASK:data", args: {count: 64}}
scaling_config: {num_workers: 3}
num_steps: 2
"""
CLUSTER = "hosts: 2\nper_host: 1\ndevice: {memory: 1 GiB}\nbetween: {bandwidth: 25 Gbit/s, latency: 20 us}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"planned_{abs(hash(str(tmp_path)))}"  # a module's name must be new to this process
    (tmp_path / f"{name}.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("TASK", name))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, RaypipeError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout  # a start that takes long says so on standard error


def test_a_plan_says_who_holds_what_and_why(folder: Path) -> None:
    text = command("plan", "run.yaml", "--set", "pipeline.num_stages=3", "--explain")
    assert text.startswith("stages:  3. Stage 0: ")
    assert "\n\nplan: 3 stages, schedule slack r=2,2, " in text
    words = (
        "forward + backward",
        "memory",
        "step: ",
        "slowest: ",
        "with 1f1b: ",
        "cut: ",
        "micro-batches: ",
        "<- chosen",
    )
    for word in words:
        assert word in text
    assert "ray" not in sys.modules


def test_a_described_cluster_is_planned_for(folder: Path) -> None:
    text = command("plan", "run.yaml", "--cluster", "cluster.yaml", "--explain", "--svg", "plan.svg")
    assert "links as described" in text
    assert "of 1.0 GiB" in text
    assert "note:    speed 1.0 of a device is that of the machine which timed the model: cpu, " in text
    assert "wrote plan.svg" in text
    ElementTree.parse(folder / "plan.svg")
    tight = folder / "tight.yaml"
    tight.write_text(CLUSTER.replace("1 GiB", "10 KiB"))
    with pytest.raises(PlanError, match=r"stage \d needs .* KiB at \dF\d, and host\d/device0 offers 10.0 KiB"):
        command("plan", "run.yaml", "--cluster", "tight.yaml")


def test_a_profile_is_saved_and_used_again(folder: Path) -> None:
    text = command("profile", "run.yaml", "-o", "profile.json")
    assert "whole model, 11 operations" in text
    saved = Profile.from_json((folder / "profile.json").read_text())
    assert len(saved.seconds_by_size) > 2
    assert all(seconds > 0 for _, seconds in saved.seconds_by_size)
    assert saved.device.startswith("cpu")
    assert saved.raw_ratio != (1.0, 1.0)
    plans = [command("plan", "run.yaml", "--profile", "profile.json", "--json") for _ in range(2)]
    assert plans[0] == plans[1]  # nothing is measured anew
    assert json.loads(command("profile", "run.yaml", "--json"))["graph"]["nodes"]
    with pytest.raises(PlanError, match="of another model: it has 11 operations and this one 13"):
        command("plan", "run.yaml", "--profile", "profile.json", "--set", "model.args.depth=6")


def test_equal_parameters_profile_nothing(folder: Path) -> None:
    text = command("plan", "run.yaml", "--set", "pipeline.partitioner=parameters")
    assert "\nstep:    32 samples in 11 micro-batches of at most 3; how long it takes is not known, " in text
    assert "\nwhy:     stages of about equal parameters, the largest " in text
    with pytest.raises(PlanError, match="no seconds to draw"):
        command("plan", "run.yaml", "--set", "pipeline.partitioner=parameters", "--svg", "x.svg")


def trainer(**pipeline: object) -> PipelineTrainer:
    torch.manual_seed(0)
    return PipelineTrainer(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.1),
        train_data=TensorDataset(torch.randn(16, 4), torch.randn(16, 4)),
        pipeline=PipelineConfig(minibatch_size=8, **pipeline),  # type: ignore[arg-type]
    )


def parts_of(plan: Plan) -> Sequence[tuple[str, int]]:
    assert plan.prediction is not None
    return [part for stage in plan.prediction.stages for part in stage.memory]


def test_the_optimizers_own_state_counts() -> None:
    plan = trainer(num_stages=1).plan()
    held = dict(parts_of(plan))
    assert held["optimizer"] == 2 * held["weights x 1"] == 2 * (2 * (16 + 4) + 8) * 4


def test_a_memory_limit_is_kept_or_refused_by_stage() -> None:
    limit = max(stage.memory_bytes for stage in trainer(num_stages=2).plan().partition.stages)
    plan = trainer(num_stages=2, memory_limit_bytes=limit).plan()
    assert all(stage.memory_bytes <= limit for stage in plan.partition.stages)
    with pytest.raises(PlanError, match=r"stage \d needs .* at \dF\d"):
        trainer(num_stages=2, memory_limit_bytes=100).plan()


def test_several_stages_per_worker_are_planned_for_workers_and_for_a_described_cluster(folder: Path) -> None:
    text = command("plan", "run.yaml", "--set", "pipeline.schedule=interleaved", "--svg", "plan.svg")
    assert text.startswith("stages:  6 on 3 workers. Stage 0 (worker 0): ")
    labels = [element.text for element in ElementTree.parse("plan.svg").iter() if element.text]
    assert labels.count("worker 2") >= 2
    rented = command(
        "plan", "run.yaml", "--cluster", "cluster.yaml", "--set", "pipeline.schedule=interleaved", "--json"
    )
    found = Plan.from_json(rented)
    assert found.schedule.wiring.placement == (0, 1, 0, 1)
    with pytest.raises(PlanError, match="num_stages=4 for num_workers=3: make the stages 6, or num_workers=2"):
        command("plan", "run.yaml", "--set", "pipeline.schedule=interleaved", "--set", "pipeline.num_stages=4")


def test_what_it_costs_and_where_it_is_cheapest(folder: Path) -> None:
    (folder / "priced.yaml").write_text(CLUSTER + "price_per_hour: 3.6\n")
    (folder / "dear.yaml").write_text(CLUSTER + "price_per_hour: 36\n")
    (folder / "small.yaml").write_text("hosts: 1\nper_host: 1\ndevice: {memory: 1 KiB}\nprice_per_hour: 0.1\n")
    text = command("plan", "run.yaml", "--cluster", "priced.yaml", "--set", "pipeline.num_stages=2")
    assert " per million samples; 7.20 an hour for 2 hosts\nrun:     " in text
    assert text.rstrip().endswith(" for 2 steps")
    three = [word for name in ("dear", "priced", "small") for word in ("--cluster", f"{name}.yaml")]
    table = command("plan", "run.yaml", *three, "--deadline", "1 h", "--tokens-per-sample", "8").splitlines()
    assert " ".join(table[0].split()) == "cluster stages step a step million tokens an hour run takes"
    assert table[3].startswith("small.yaml   No cut ")
    assert table[4] == "The cheapest within 1 h is priced.yaml."
    rows = json.loads(command("plan", "run.yaml", *three, "--json"))
    assert [row["cheapest"] for row in rows] == [False, True, False]
    assert rows[0]["step"] == pytest.approx(10 * rows[1]["step"])
    dear, priced = (Plan.from_json(json.dumps(row["plan"])).partition for row in rows[:2])
    assert dear == priced
    late = command("plan", "run.yaml", *three, "--deadline", "0.000001 s")
    assert late.rstrip().endswith("None of them ends within 0.000001 s.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--deadline", "1 h"), "give one or more --cluster with prices"),
        (("--cluster", "cluster.yaml", "--deadline", "1 h"), "cluster.yaml names no prices"),
        (("--cluster", "cluster.yaml", "--deadline", "soon"), "'soon' is not a deadline; write it as in 12 h"),
        (("--cluster", "cluster.yaml", "--deadline", "1 h", "--set", "num_epochs=1"), "add num_steps"),
        (("--cluster", "cluster.yaml", "--deadline", "1 h", "--explain"), "are about one plan"),
    ],
)
def test_mistakes_about_cost_are_named(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(RaypipeError, match=words):
        command("plan", "run.yaml", *arguments)
