"""A plan for its reader: four lines of real plans, all of it under explain, and no riddles in either."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.plan import Plan
from tests.hugging_face import hugging_face
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

NAMES = ("stages:  ", "step:    ", "memory:  ", "why:     ")
SIZE = r"\d+(\.\d)? [KMG]?i?B"
TIME = r"[\d.]+ (s|ms|us)"


def sequential(run_config: object = None, **pipeline: object) -> raypipe.PipelineTrainer:
    torch.manual_seed(0)
    return trainer_of(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)),
        train_data=TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,))), run_config=run_config,
        **{"minibatch_size": 16, "num_microbatches": "auto", "partitioner": "auto"} | pipeline,
    )  # fmt: skip


def gpt2(**pipeline: object) -> raypipe.PipelineTrainer:
    case = hugging_face("gpt2")
    return raypipe.PipelineTrainer(
        case.build,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        train_data=case.data(32),
        pipeline=raypipe.PipelineConfig(minibatch_size=8, num_microbatches=4, num_stages=2, **pipeline),  # type: ignore[arg-type]
    )


def lines_of(plan: Plan) -> list[str]:
    """The text behind each of the four names; whatever follows is a note."""
    lines = str(plan).splitlines()
    for line, name in zip(lines, NAMES, strict=False):
        assert line.startswith(name)
    assert [line for line in lines[4:] if not line.startswith("note:    ")] == []
    return [line[len(name) :] for line, name in zip(lines, NAMES, strict=False)]


def test_the_four_lines_of_a_sequential() -> None:
    plan = sequential(partitioner=["2"], num_microbatches=4).plan()
    stages, step, memory, why = lines_of(plan)
    assert stages == "2. Stage 0: layer 0 (Linear) to layer 1 (ReLU); stage 1: layer 2 (Linear) to layer 4 (Linear)"
    assert step == "16 samples in 4 micro-batches of 4; how long it takes is not known, for nothing was timed"
    assert memory.startswith("parameters take at most 17.3 KiB, on stage 1; ")
    assert why == "cut as set by PipelineConfig.partitioner"


def test_a_measured_plan_says_seconds_bytes_and_reasons() -> None:
    plan = sequential(num_microbatches=4, memory_limit_bytes=1 << 20).plan()
    stages, step, memory, why = lines_of(plan)
    assert re.fullmatch(r"2\. Stage 0: layer 0 \(Linear\)( to .*)?; stage 1: (layer .* to )?layer 4 \(Linear\)", stages)
    assert re.fullmatch(
        rf"{TIME} predicted for 16 samples in 4 micro-batches of 4 \([\d,.]+ samples/s\), workers idle \d+% of it; "
        r"computing times measured, links assumed \(1 GB/s, 0\.1 ms\)",
        step,
    )
    assert re.fullmatch(rf"at most {SIZE} on worker 0, {SIZE} on worker 1, of 1\.0 MiB each", memory)
    assert why.endswith("; 2 stages, as set by num_stages")


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ("transformer.h.1", "to transformer.h.0 (GPT2Block); stage 1: transformer.h.1 (GPT2Block) to lm_head (Linear)"),
        ("transformer.h.1.mlp", "to transformer.h.1.ln_2 (LayerNorm); stage 1: transformer.h.1.mlp (GPT2MLP) to"),
    ],
)
def test_stages_have_the_names_of_the_users_modules(cut: str, words: str) -> None:
    stages = lines_of(gpt2(partitioner=[cut]).plan())[0]
    assert stages.startswith("2. Stage 0: transformer.wte (Embedding) to ")
    assert words in stages


@pytest.mark.parametrize("count", [2, 5])
def test_a_described_cluster_tells_its_devices_limits_and_what_speed_means(count: int) -> None:
    between = Link(25e9 / 8, 2e-5)
    cluster = Cluster.hosts(count, 1, inside=Link(), between=between, device=ComputeDevice("gpu", 2.0, 1 << 24))
    plan = sequential(num_stages="auto" if count == 2 else 5, num_microbatches=4).plan(cluster=cluster)
    stages, step, memory, _ = lines_of(plan)
    used = plan.partition.num_stages
    assert stages.startswith(f"{used}. Stage 0: ")
    assert step.endswith("links as described") or used == 1
    if used > 4:
        assert "; ...; stage 4: " in stages
        assert re.fullmatch(rf"at most {SIZE} on host\d/device0, the fullest of 5 workers, of 16\.0 MiB each", memory)
    else:
        assert memory.endswith(", of 16.0 MiB" + " each" * (used > 1))
        assert "on host" in memory
    assert any("speed 1.0 of a device is that of the machine which timed the model: cpu, " in n for n in plan.notes)


def test_codecs_on_auto_are_chosen_for_a_described_cluster_and_schedules_on_auto_never_choose_one() -> None:
    slow = Cluster.hosts(2, 1, inside=Link(), between=Link(1e5, 0.05, "half", latency_occupies_wire=True))
    auto = sequential(num_stages=2, codec_forward="auto", codec_backward="auto")
    assert dict(auto.plan(cluster=slow).reasons)["choice of codecs"].startswith(
        "int8/bf16, which make the step shorter"
    )
    for plan in (auto.plan(), sequential(num_stages=2).plan(cluster=slow)):
        assert not {"codecs", "choice of codecs"} & dict(plan.reasons).keys()


def test_explain_is_the_four_lines_and_then_the_rest() -> None:
    trainer = sequential(num_microbatches=4)
    plan, all_of_it = trainer.plan(), trainer.plan(explain=True)
    assert plan == all_of_it
    assert str(all_of_it) == plan.explain() == all_of_it.explain()
    assert plan.explain().startswith(str(plan) + "\n\nplan: 2 stages, ")
    for words in ("forward + backward", "slowest: ", "with 1f1b: ", "cut: ", "schedule: ", "is fullest at "):
        assert words in plan.explain()
        assert words not in str(plan)
    assert all_of_it.to_json() == plan.to_json()
    assert str(Plan.from_json(plan.to_json())) == str(plan)
    assert "explained" not in plan.to_json()


def test_fit_says_where_the_folder_is_first_and_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, progress: bool) -> list[str]:
        folder = SimpleNamespace(name=name, storage_path=str(tmp_path))
        sequential(folder, partitioner="parameters", num_microbatches=2).fit(num_steps=2, local=True, progress=progress)
        return capsys.readouterr().err.splitlines()

    told = run("told", True)
    said = [line for line in told if line.startswith("told: ")]
    assert said[0] == f"told: its folder is {tmp_path / 'told'}"
    assert said[-1] == told[-1] == f"told: finished, step 2/2; its folder is {tmp_path / 'told'}"
    assert not any(str(tmp_path) in line for line in run("silent", False))
