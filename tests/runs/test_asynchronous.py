"""Asynchronous pipelines end with the weights of their emulator, in plain PyTorch, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data.open_data import open_data
from raypipe.errors import ConfigError
from tests.emulators.apart import emulate_apart
from tests.emulators.fills import fills_of
from tests.emulators.nets import NETS, frozen_first
from tests.emulators.training import Emulated, emulate
from tests.emulators.versions import (
    Mode,
    bounded,
    flush,
    interval_of,
    round_robin,
    shifted,
    stashing,
    two_buffered,
    vertical_sync,
)

pytestmark = pytest.mark.usefixtures("shared_captures")

STEPS, MICROBATCHES = 20, 4
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Policy:
    """Fields of PipelineConfig, and the mode that they mean for so many stages."""

    fields: dict[str, Any]
    mode: Callable[[int], Mode]


def _bounded(versions: int, depth: int = 1) -> Callable[[int], Mode]:
    return lambda stages: bounded(stages, interval_of(stages, MICROBATCHES, versions, depth), depth)


POLICIES = {
    "flush": Policy({"schedule": "1f1b"}, lambda stages: flush(MICROBATCHES)),
    "stashing": Policy({"schedule": "pipedream"}, stashing),
    "two versions": Policy({"schedule": "pipedream", "weight_versions": 2}, _bounded(2)),
    "three versions": Policy({"schedule": "pipedream", "weight_versions": 3}, _bounded(3)),
    "every second": Policy({"schedule": "pipedream", "update_interval": 2}, lambda stages: bounded(stages, 2)),
    "vertical sync": Policy({"schedule": "pipedream", "vertical_sync": True}, vertical_sync),
    "vertical sync, every second": Policy(
        {"schedule": "pipedream", "vertical_sync": True, "update_interval": 2}, lambda stages: vertical_sync(stages, 2)
    ),
    "2bw": Policy({"schedule": "2bw"}, lambda stages: two_buffered(MICROBATCHES)),
    "stashing, deeper": Policy({"schedule": "pipedream", "slack": 2}, lambda stages: stashing(stages, 2)),
    "three versions, deeper": Policy({"schedule": "pipedream", "slack": 2, "weight_versions": 3}, _bounded(3, 2)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2),
}
SHAPES = {  # samples of an epoch and of a mini-batch
    "one fill": (160, 8),
    "ragged epochs": (44, 8),  # five mini-batches and half of one
    "ragged micro-batches": (70, 7),  # 2 2 2 1
    "twelves": (66, 12),  # five mini-batches and half of one
}


@dataclass(frozen=True)
class Setup:
    """One training, for a pipeline and for its emulator."""

    net: str = "mlp"
    stages: int = 3
    policy: str = "stashing"
    optimizer: str = "sgd"
    shape: str = "one fill"
    max_grad_norm: float | None = None
    reduction: str = "mean"
    drain_every: int | None = None
    recompute: str = "auto"
    precision: str = "fp32"
    microbatches: int = MICROBATCHES

    @property
    def mode(self) -> Mode:
        return POLICIES[self.policy].mode(self.stages)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    """Of every update, so that a scheduler that counts mini-batches shows."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)


def trained(setup: Setup, folder: Path, **more: Any) -> Tensors:
    """What the pipeline's last checkpoint holds.

    Args:
        more: further fields of PipelineConfig.
    """
    net, (samples, minibatch) = NETS[setup.net], SHAPES[setup.shape]
    trainer = PipelineTrainer(
        net.model(),
        loss_fn=net.loss_fn,
        optimizer=OPTIMIZERS[setup.optimizer],
        lr_scheduler=decay,
        train_data=net.data(samples),
        pipeline=PipelineConfig(
            num_stages=setup.stages,
            minibatch_size=minibatch,
            num_microbatches=setup.microbatches,
            partitioner=tuple(map(str, net.cuts[setup.stages])),
            loss_reduction=setup.reduction,
            max_grad_norm=setup.max_grad_norm,
            checkpoint_interval_steps=setup.drain_every or "auto",
            recompute=setup.recompute,
            precision=setup.precision,
            **(POLICIES[setup.policy].fields | more),
        ),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )
    result = trainer.fit(num_steps=STEPS, local=True, progress=False)
    assert [record.step for record in result.records] == list(range(STEPS)), "steps are mini-batches"
    assert all(math.isfinite(record.loss) for record in result.records)
    return load_state_dict(result.checkpoint)


def emulated(setup: Setup, mode: Mode | None = None, lanes: int = 1) -> Emulated:
    """The same in one loop; the order of the samples is raypipe's."""
    net, (samples, minibatch) = NETS[setup.net], SHAPES[setup.shape]
    source = open_data(net.data(samples), seed=0)

    def epoch_data(epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = source.read(epoch, 0, samples, (0, 1))
        return inputs, targets

    return emulate(
        net.model(),
        net.cuts[setup.stages],
        fills_of(epoch_data, minibatch, -(-minibatch // setup.microbatches), STEPS, setup.drain_every),
        mode or setup.mode,
        loss_fn=net.loss_fn,
        make_optimizer=OPTIMIZERS[setup.optimizer],
        make_scheduler=decay,
        reduction=setup.reduction,
        max_grad_norm=setup.max_grad_norm,
        dtype=torch.bfloat16 if setup.precision == "bf16" else None,
        lanes=lanes,
    )


def unequal(pipeline: Tensors, emulator: Emulated) -> list[str]:
    """Names of tensors that differ; all of both sides must be there."""
    wanted = {**emulator.parameters, **emulator.buffers}
    assert pipeline.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(pipeline[name], wanted[name])]


def _turn(net: str, stages: int, policy: str) -> int:
    return list(NETS).index(net) + stages + list(POLICIES).index(policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "stages", "policy"),
    # The cheap model meets everything; the others meet every policy, and every number of stages with half of them.
    [row for row in itertools.product(NETS, (2, 3, 4), POLICIES) if row[0] == "mlp" or _turn(*row) % 2],
)
def test_weights_are_the_emulators(tmp_path: Path, net: str, stages: int, policy: str) -> None:
    """Optimizers and shapes take turns."""
    turn = _turn(net, stages, policy) // 2
    optimizer, shape = list(OPTIMIZERS)[turn % 2], list(SHAPES)[(turn + stages) % 3]
    setup = Setup(net, stages, policy, optimizer, shape)
    assert unequal(trained(setup, tmp_path), emulated(setup)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "policy", "optimizer", "apart"),
    [
        (3, "stashing", "sgd", True),
        (4, "every second", "adamw", True),
        (3, "vertical sync", "adamw", True),
        (2, "every second", "sgd", False),
        (4, "two versions", "adamw", False),
        (3, "2bw", "sgd", False),
        (3, "2bw", "adamw", False),
        (4, "three versions, deeper", "sgd", False),
    ],
)
def test_clipping(tmp_path: Path, stages: int, policy: str, optimizer: str, apart: bool) -> None:
    """By stage where an update has fewer micro-batches than there are stages, else by the whole model."""
    limit = 0.45
    setup = Setup("transformer", stages, policy, optimizer, "ragged epochs", max_grad_norm=limit)
    wanted = emulated(setup)
    assert {len(norms) for norms in wanted.norms} == ({1, stages} if apart else {1})
    unclipped = emulated(Setup("transformer", stages, policy, optimizer, "ragged epochs"))
    assert unequal(dict(unclipped.parameters), wanted), "the limit has no effect"
    assert unequal(trained(setup, tmp_path), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "policy", "recompute"),
    [("mlp", "stashing", "auto"), ("transformer", "2bw", "auto"), ("transformer", "vertical sync", "always")],
)
def test_in_bf16(tmp_path: Path, net: str, policy: str, recompute: str) -> None:
    """Versions of bf16 leaves, beside parameters in fp32."""
    setup = Setup(net, 3, policy, "adamw", "ragged epochs", recompute=recompute)
    low = replace(setup, precision="bf16")
    assert unequal(trained(low, tmp_path), emulated(low)) == []
    assert len(unequal(dict(emulated(setup).parameters), emulated(low))) > 3, "the precision does nothing"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stashing", "two versions", "2bw"])
def test_sums_of_losses(tmp_path: Path, policy: str) -> None:
    setup = Setup(stages=4, policy=policy, optimizer="adamw", shape="ragged micro-batches", reduction="sum")
    assert unequal(trained(setup, tmp_path), emulated(setup)) == []


@pytest.mark.slow
@pytest.mark.parametrize("drain_every", [None, 3])
@pytest.mark.parametrize("policy", ["stashing", "every second", "2bw", "stashing, deeper"])
def test_a_first_stage_that_learns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, drain_every: int | None
) -> None:
    """It has done with a mini-batch before the others have, and may be ahead of them by whole ones."""
    monkeypatch.setitem(NETS, "frozen", frozen_first("mlp", 3))
    setup = Setup("frozen", 3, policy, "sgd", "ragged epochs", drain_every=drain_every)
    assert unequal(trained(setup, tmp_path), emulated(setup)) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stashing", "every second", "vertical sync", "2bw"])
def test_a_checkpoint_drains(tmp_path: Path, policy: str) -> None:
    """After it, versions are counted anew."""
    setup = Setup("cnn", 3, policy, "sgd", "ragged epochs", drain_every=3)
    never = emulated(Setup("cnn", 3, policy, "sgd", "ragged epochs"))
    wanted = emulated(setup)
    assert unequal({**never.parameters, **never.buffers}, wanted)
    assert unequal(trained(setup, tmp_path), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_version_shifted_by_one_is_seen(tmp_path: Path, policy: str) -> None:
    """One micro-batch on one stage, one update older."""
    setup = Setup(policy=policy)
    found, mode = trained(setup, tmp_path), setup.mode
    assert unequal(found, emulated(setup)) == []
    for stage in range(setup.stages):
        k = next(k for k in itertools.count() if mode.version(stage, k) > 0)
        assert unequal(found, emulated(setup, shifted(mode, {(stage, k): -1}))), f"stage {stage}"


@pytest.mark.slow
def test_policies_differ() -> None:
    """On the same data from the same weights; "three versions" of three stages are stashing's.

    Emulators show it for pipelines, which have their bits.
    """
    names = [name for name in POLICIES if name not in ("three versions", "two versions")]
    ends = {name: emulated(Setup(policy=name)).parameters for name in names}
    for one, other in itertools.combinations(names, 2):
        assert all(not torch.equal(ends[one][n], ends[other][n]) for n in ends[one]), (one, other)


PIPEDREAM, BUFFERED, SYNC = "stashing", "2bw", "vertical sync"
PLACED = [(2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (1, 2, 2)]


def pair(folder: Path, replicas: tuple[int, ...], policy: str, **more: Any) -> tuple[Any, Any]:
    """(the pipeline's weights, the emulator's) after 20 mini-batches; an update has a micro-batch for each lane."""
    lanes = math.lcm(*replicas)
    fields = {name: more.pop(name) for name in ("update_interval", "num_lanes") if name in more}
    lanes = fields.get("num_lanes", lanes)
    setup = Setup(stages=len(replicas), policy=policy, microbatches=lanes * 2, **more)
    every = fields.get("update_interval", lanes)
    mode: Mode = (
        two_buffered(setup.microbatches)
        if policy == BUFFERED
        else round_robin(replicas, every, vertical=policy == SYNC)
    )
    return trained(setup, folder, num_replicas=replicas, **fields), emulated(setup, mode, lanes)


def losses(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, as they were told."""
    rows = pq.read_table(folder / "run" / "metrics.parquet").to_pylist()
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.engine
@pytest.mark.parametrize("policy", [PIPEDREAM, BUFFERED])
@pytest.mark.parametrize("replicas", PLACED)
def test_weights_of_replicas_are_the_emulators(tmp_path: Path, replicas: tuple[int, ...], policy: str) -> None:
    """The last mini-batch of an epoch is smaller, and a synchronous step of its own."""
    shape = "twelves" if 3 in replicas else "ragged epochs"
    optimizer = "sgd" if sum(replicas) % 2 else "adamw"
    found, wanted = pair(tmp_path, replicas, policy, shape=shape, optimizer=optimizer)
    assert unequal(found, wanted) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("net", "replicas", "policy", "more"),
    [
        ("transformer", (2, 1), PIPEDREAM, {"max_grad_norm": 0.45, "optimizer": "adamw"}),
        ("transformer", (2, 1, 2), PIPEDREAM, {"max_grad_norm": 0.45}),
        ("transformer", (1, 2), BUFFERED, {"max_grad_norm": 0.45, "optimizer": "adamw"}),
        ("mlp", (2, 1), SYNC, {}),
        ("mlp", (1, 2, 1), SYNC, {"optimizer": "adamw"}),
        ("mlp", (2, 1), PIPEDREAM, {"drain_every": 3}),
        ("mlp", (2, 1), PIPEDREAM, {"update_interval": 4}),
        ("mlp", (2, 1), PIPEDREAM, {"num_lanes": 4}),
        ("transformer", (2, 1), BUFFERED, {"precision": "bf16", "recompute": "always"}),
        ("mlp", (2, 2), PIPEDREAM, {"reduction": "sum"}),
    ],
    ids=["clips", "clips apart", "2bw clips", "vertical", "later", "drains", "bounded", "lanes", "bf16", "sums"],
)  # fmt: skip
def test_any_policy(tmp_path: Path, net: str, replicas: tuple[int, ...], policy: str, more: dict[str, Any]) -> None:
    found, wanted = pair(tmp_path, replicas, policy, net=net, shape="ragged epochs", **more)
    assert unequal(found, wanted) == []


@pytest.mark.engine
@pytest.mark.parametrize(("replicas", "policy"), [((2, 1, 1), PIPEDREAM), ((1, 2, 1), SYNC), ((2, 2, 1), BUFFERED)])
def test_replicas_of_a_stage_that_learns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: tuple[int, ...], policy: str
) -> None:
    """They make updates too, of nothing, and wait for nobody; versions are those of the first stage that learns."""
    monkeypatch.setitem(NETS, "frozen", frozen_first("mlp", 3))
    setup = Setup("frozen", 3, policy, shape="ragged epochs", drain_every=3)
    found = trained(setup, tmp_path, num_replicas=replicas)
    if policy == SYNC:
        mode = round_robin(replicas[1:], 2, vertical=True)
    else:
        mode = two_buffered(4) if policy == BUFFERED else round_robin(replicas, 2)
    assert unequal(found, emulated(setup, mode, 2)) == []


@pytest.mark.engine
def test_2bw_has_the_same_bits_however_many_replicas(tmp_path: Path) -> None:
    """Its versions do not depend on how far stages run ahead."""
    setup = Setup(stages=2, policy=BUFFERED, shape="ragged epochs")
    alone, told = trained(setup, tmp_path / "alone", num_lanes=2), losses(tmp_path / "alone")
    for replicas in ([2, 1], [1, 2], [2, 2]):
        found = trained(setup, tmp_path / str(replicas), num_replicas=replicas, num_lanes=2)
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
        assert losses(tmp_path / str(replicas)) == told
    assert SHAPES["ragged epochs"][0] % SHAPES["ragged epochs"][1], "the smaller mini-batch is part of it"


@pytest.mark.engine
def test_a_version_shifted_by_one_on_a_replica_is_seen(tmp_path: Path) -> None:
    """What replicas change about versions, the emulator without them does not have."""
    found, _ = pair(tmp_path, (2, 1), PIPEDREAM, optimizer="sgd")
    setup = Setup(stages=2, policy=PIPEDREAM)
    assert unequal(found, emulated(setup, round_robin((1, 1), 2), 2))


def apart(setup: Setup, replicas: tuple[int, ...], *, scales: bool = True) -> Emulated:
    """The emulator of ``update_interval="per_replica"``."""
    net, (samples, minibatch) = NETS[setup.net], SHAPES[setup.shape]
    source = open_data(net.data(samples), seed=0)

    def epoch_data(epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = source.read(epoch, 0, samples, (0, 1))
        return inputs, targets

    fills = fills_of(epoch_data, minibatch, -(-minibatch // setup.microbatches), STEPS, setup.drain_every)
    parameters = emulate_apart(
        net.model(), net.cuts[setup.stages], replicas, fills, loss_fn=net.loss_fn,
        make_optimizer=OPTIMIZERS[setup.optimizer], make_scheduler=decay, max_grad_norm=setup.max_grad_norm,
        scales=scales,
    )  # fmt: skip
    return Emulated(parameters, {}, [], [])


@pytest.mark.engine
@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        ((2, 1), {"optimizer": "sgd"}),
        ((2, 1), {"optimizer": "adamw", "shape": "ragged epochs", "drain_every": 3}),
        ((1, 2), {"optimizer": "adamw", "shape": "ragged micro-batches"}),
        ((3, 1), {"optimizer": "sgd", "shape": "twelves", "microbatches": 6}),
        ((2, 1, 1), {"optimizer": "adamw", "max_grad_norm": 0.2, "shape": "ragged epochs"}),
        ((2, 3), {"optimizer": "sgd", "shape": "twelves", "microbatches": 6}),
    ],
)
def test_stages_update_as_often_as_their_replicas_are_done(
    tmp_path: Path, replicas: tuple[int, ...], more: dict[str, Any]
) -> None:
    """As published, with the learning rate scaled; without that, and with updates in step, the weights are others."""
    setup = Setup(stages=len(replicas), policy=PIPEDREAM, **more)
    found = trained(setup, tmp_path, num_replicas=replicas, update_interval="per_replica")
    assert unequal(found, apart(setup, replicas)) == []
    assert unequal(found, apart(setup, replicas, scales=False))
    if setup.max_grad_norm is not None:
        assert unequal(found, apart(replace(setup, max_grad_norm=None), replicas)), "the limit has no effect"
    if replicas == (2, 1) and setup.drain_every is None:
        assert unequal(found, emulated(setup, round_robin(replicas, 2), 2))


@pytest.mark.engine
def test_updates_per_replica_of_a_loss_that_counts_are_refused(tmp_path: Path) -> None:
    """Only the last stage could weigh them."""
    setup = Setup(stages=2, policy=PIPEDREAM, reduction="auto")
    with pytest.raises(
        ConfigError, match=r"update_interval='per_replica' with a loss that averages over labels other than -100"
    ):
        trained(setup, tmp_path, num_replicas=[2, 1], update_interval="per_replica")
