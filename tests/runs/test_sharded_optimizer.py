"""Replicas that share out the state of their optimizer: the same bits, less memory, checkpoints for anybody."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.engine.local import LocalFleet
from raypipe.errors import CheckpointError
from tests.exactness import SHAPES, Run, same_bits, train
from tests.runs.test_replicas import told, trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

SHARDED = {"shard_optimizer": True}


def wide() -> nn.Sequential:
    """Layers whose slices begin within a parameter, and layers that one replica steps whole."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 173), nn.ReLU(), nn.Linear(173, 131), nn.Dropout(0.1), nn.Linear(131, 97), nn.ReLU(),
        nn.Linear(97, 3),
    )  # fmt: skip


def states_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """By run that ends from now on, elements of optimizer state of each of its workers."""
    found: list[list[int]] = []
    stop = LocalFleet.stop

    def stopped(fleet: LocalFleet) -> None:
        found.append(
            [
                sum(
                    x.numel()
                    for state in executor.states
                    for of_one in (state.optimizer.state.values() if state.optimizer else ())
                    for x in of_one.values()
                    if x.numel() > 1
                )
                for executor in fleet.executors
            ]
        )
        stop(fleet)

    monkeypatch.setattr(LocalFleet, "stop", stopped)
    return found


@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        ([2, 1], {"max_grad_norm": 0.1}),
        ([2, 2], {"num_lanes": 4, "schedule": "gpipe", "recompute": "always", "max_grad_norm": 0.1}),
        ([3, 1], {"num_microbatches": 8, "codec_sums": "bf16"}),
        ([3], {"num_stages": 1, "precision": "bf16", "max_grad_norm": 0.1}),
        ([2], {"num_stages": 1, "precision": "fp16", "max_grad_norm": 0.1}),
        ([2, 2, 2, 2], {"num_stages": 4, "schedule": "interleaved", "max_grad_norm": 0.1}),
        ([2, 2, 2, 2], {"num_stages": 4, "schedule": "zb-v"}),
        ([2, 2], {"schedule": "zb-h1"}),
    ],
    ids=["2-1", "2-2", "3-1", "3", "fp16", "interleaved", "zb-v", "zb-h1"],
)
def test_the_same_bits_as_whole_states_and_a_part_of_the_memory(
    replicas: list[int], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = states_of(monkeypatch)
    for name, how in (("whole", {}), ("shared", SHARDED)):
        trainer(tmp_path, name, wide(), num_replicas=replicas, **more, **how).fit(
            num_steps=3, local=True, progress=False
        )
    (rows, one), (others, two) = told(tmp_path / "whole"), told(tmp_path / "shared")
    assert repr(rows) == repr(others)
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())
    whole, shared = held
    for first, count in zip(*_groups(replicas, len(whole)), strict=True):
        of_stage, parts = whole[first], shared[first : first + count]
        assert sum(parts) == of_stage, "every element has its state once"
        assert max(parts) - min(parts) <= 2 * 1024 * 4, "about the same on each replica: AdamW has two, of whole blocks"


def _groups(replicas: list[int], workers: int) -> tuple[list[int], list[int]]:
    """First worker of each group, and how many there are in it."""
    counts = replicas if sum(replicas) == workers else [replicas[0]] * (workers // replicas[0])
    return [sum(counts[:at]) for at in range(len(counts))], counts


@pytest.mark.parametrize(
    ("name", "replicas", "more"),
    [
        ("tied-lm", (2, 1, 2), {"max_grad_norm": 0.5}),
        ("tied-lm", (2,), {"max_grad_norm": 0.5}),
        ("frozen-middle", (1, 2, 1), {}),
    ],
)
def test_parameters_that_are_used_twice_or_never(name: str, replicas: tuple[int, ...], more: dict[str, Any]) -> None:
    """Of other stages too, which hold their state whole."""
    stages = len(replicas)
    runs = [
        train(name, stages, SHAPES["ragged-epoch"], "1f1b", "adamw", replicas=replicas, lanes=2, shards=shards, **more)
        for shards in (False, True)
    ]
    assert _told(runs[0]) == _told(runs[1])
    assert all(same_bits(p, runs[1].parameters[n]) for n, p in runs[0].parameters.items())


def _told(run: Run) -> tuple[list[float], list[float]]:
    return run.losses, run.grad_norms


def test_bytes_that_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters come back whole in place of totals; besides, norms of blocks go to the first replica, 4 bytes of 4096.

    So no byte more is sent, but where sums travel in half their bytes: 2 + 4 of each element then, and not 2 + 2.
    """
    sent: Counter[tuple[bool, str, int]] = Counter()
    run = LocalFleet.run

    def counted(fleet: LocalFleet, *requests: Any, **how: Any) -> Iterator[Any]:
        settings = fleet.executors[0].settings
        for reports in run(fleet, *requests, **how):
            key = settings.shard_optimizer, settings.codec_sums, len(fleet.executors)
            sent[key] += sum(report.exchanged_bytes for of_stage in reports for report in of_stage)
            yield reports

    monkeypatch.setattr(LocalFleet, "run", counted)
    gradients = sum(p.numel() * 4 for p in wide().parameters())
    for count, codec in ((2, "none"), (3, "none"), (2, "bf16")):
        for how in ({}, SHARDED):
            one = {"num_stages": 1, "num_replicas": count, "eval_interval_steps": None, "codec_sums": codec}
            name = f"{count}{codec}{how}"
            trainer(tmp_path, name, wide(), **one, **how).fit(num_steps=1, local=True, progress=False)
        whole = 2 * (count - 1) * gradients
        shares = {"none": (1.0, 1.0), "bf16": (0.5, 0.75)}[codec]
        assert [sent[shards, codec, count] / whole for shards in (False, True)] == pytest.approx(shares, rel=0.006)


@pytest.mark.parametrize(
    "begun", [{"num_replicas": [3, 1], **SHARDED}, {"num_replicas": [1, 2], "num_lanes": 6}], ids=["shared", "whole"]
)
def test_checkpoints_are_read_by_any_number_of_replicas(begun: dict[str, Any], tmp_path: Path) -> None:
    """Whether they share out the state or not, and by other stages."""
    shape = {"num_microbatches": 8, "max_grad_norm": 0.1}
    goes_on = [begun, {"num_replicas": [2, 2], **SHARDED}, {}, {"num_stages": 3, "num_replicas": [2, 1, 3], **SHARDED}]
    trainer(tmp_path, "one", wide(), **shape, num_lanes=6).fit(num_steps=8, local=True, progress=False)
    for at, how in enumerate(goes_on):
        trainer(tmp_path, "two", wide(), **{"num_lanes": 6, **shape, **how}).fit(
            num_steps=2 * (at + 1), local=True, progress=False
        )
        folder = tmp_path / "two" / "checkpoints" / f"step_{2 * (at + 1):07d}"
        manifest = json.loads((folder / "manifest.json").read_bytes())
        counts = how.get("num_replicas", [1, 1]) if "shard_optimizer" in how else [1] * len(manifest["stages"])
        assert [1 + len(entry.get("pieces", ())) for entry in manifest["stages"]] == counts
        assert manifest["format"] == (4 if max(counts) > 1 else 3)
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "two")
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_a_checkpoint_that_lacks_slices_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "one", wide(), num_replicas=[2, 1], **SHARDED).fit(num_steps=1, local=True, progress=False)
    folder = tmp_path / "one" / "checkpoints" / "step_0000001"
    (folder / "stage_0.optimizer.1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"stage_0\.optimizer\.1\.safetensors"):
        trainer(tmp_path, "one", wide(), num_replicas=[2, 1]).fit(num_steps=2, local=True, progress=False)


def test_the_plan_counts_less_memory_and_says_so(tmp_path: Path) -> None:
    """Wherever a measured profile has it cut: every stage has two replicas."""
    timed = {"num_replicas": 2, "partitioner": "auto", "profile_budget_s": 0.01}
    plans = [trainer(tmp_path, "plan", wide(), **timed, **how).plan() for how in ({}, SHARDED)]
    whole, shared = ([dict(stage.memory)["optimizer"] for stage in plan.prediction.stages] for plan in plans)
    elements = sum(p.numel() for p in wide().parameters())
    assert sum(whole) == 2 * 4 * elements, "AdamW has two numbers for each"
    assert sum(shared) == sum(whole) // 2
    assert "Each of the 2 replicas of stage 0 holds 1/2 of its optimizer's state" in str(plans[1])
    words = str(trainer(tmp_path, "plan", num_stages=1, num_replicas="auto", partitioner="auto", **SHARDED).plan())
    assert "shard_optimizer changes nothing: no stage that trains has several workers." in words
