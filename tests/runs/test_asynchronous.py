"""Asynchronous pipelines end with the weights of their emulator, in plain PyTorch, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
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
from tests.emulators.nets import NETS, frozen_first
from tests.emulators.training import Emulated, Fill, emulate, fills_of
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
from tests.exactness import same_bits

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
EVERY = {**NETS, "frozen": frozen_first("mlp", 3)}


class MuonBesideAdamW:
    """Two optimizers in one object: Muon steps whole matrices, AdamW the others."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        matrices, others = ([p for _, p in named if (p.ndim == 2) is wanted] for wanted in (True, False))
        self.muon = torch.optim.Muon(matrices, lr=2e-2, adjust_lr_fn="match_rms_adamw") if matrices else None
        self.adamw = torch.optim.AdamW(others, lr=1e-2) if others else None
        self.param_groups = [group for one in self.held() for group in one.param_groups]

    def held(self) -> list[torch.optim.Optimizer]:
        return [one for one in (self.muon, self.adamw) if one is not None]

    def step(self) -> None:
        for one in self.held():
            one.step()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2),
    "nadam": lambda named: torch.optim.NAdam(named, lr=1e-2, betas=(0.99, 0.999), decoupled_weight_decay=True),
    "muon": MuonBesideAdamW,
}
DISCOUNT_UPDATES = 13
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
    replicas: tuple[int, ...] = ()
    num_lanes: int | None = None
    update_interval: int | str | None = None
    correction: str = "none"

    @property
    def lanes(self) -> int:
        return self.num_lanes or math.lcm(*self.replicas)

    @property
    def mode(self) -> Mode:
        if self.policy == "2bw":
            return two_buffered(self.microbatches)
        if not self.replicas:
            return POLICIES[self.policy].mode(self.stages)
        vertical, every = self.policy == "vertical sync", int(self.update_interval or self.lanes)
        learning = self.replicas[1:] if vertical and self.net == "frozen" else self.replicas
        return round_robin(learning, every, vertical=vertical)

    @property
    def fields(self) -> dict[str, Any]:
        """Those of PipelineConfig that the policy and the replicas ask for."""
        given = {
            "num_replicas": self.replicas,
            "num_lanes": self.num_lanes,
            "update_interval": self.update_interval,
            "stale_correction": self.correction,
            "discount_updates": DISCOUNT_UPDATES if self.correction == "discount" else None,
        }
        return POLICIES[self.policy].fields | {name: value for name, value in given.items() if value}


def replicated(replicas: tuple[int, ...], policy: str = "stashing", **more: Any) -> Setup:
    """An update has two micro-batches for each lane."""
    lanes = more.get("num_lanes") or math.lcm(*replicas)
    return Setup(stages=len(replicas), policy=policy, replicas=replicas, **{"microbatches": 2 * lanes} | more)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    """Of every update, so that a scheduler that counts mini-batches shows."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)


def decay_each(optimizer: Any) -> Any:
    """Of the emulator's optimizers: of each that an object holds."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return decay(optimizer)
    held = [decay(one) for one in optimizer.held()]
    return SimpleNamespace(step=lambda: [one.step() for one in held])


def trained(setup: Setup, folder: Path) -> Tensors:
    """What the pipeline's last checkpoint holds."""
    net, (samples, minibatch) = EVERY[setup.net], SHAPES[setup.shape]
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
            **setup.fields,
        ),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )
    result = trainer.fit(num_steps=STEPS, local=True, progress=False)
    assert [record.step for record in result.records] == list(range(STEPS)), "steps are mini-batches"
    assert all(math.isfinite(record.loss) for record in result.records)
    return load_state_dict(result.checkpoint)


def filled(setup: Setup) -> Iterator[Fill]:
    """The samples in raypipe's own order."""
    (samples, minibatch), data = SHAPES[setup.shape], EVERY[setup.net].data
    source = open_data(data(samples), seed=0)

    def epoch_data(epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = source.read(epoch, 0, samples, (0, 1))
        return inputs, targets

    return fills_of(epoch_data, minibatch, -(-minibatch // setup.microbatches), STEPS, setup.drain_every)


def emulated(setup: Setup, mode: Mode | None = None) -> Emulated:
    """Train in one loop."""
    net = EVERY[setup.net]
    return emulate(
        net.model(),
        net.cuts[setup.stages],
        filled(setup),
        mode or setup.mode,
        loss_fn=net.loss_fn,
        make_optimizer=OPTIMIZERS[setup.optimizer],
        make_scheduler=decay_each,
        reduction=setup.reduction,
        max_grad_norm=setup.max_grad_norm,
        dtype=torch.bfloat16 if setup.precision == "bf16" else None,
        lanes=setup.lanes,
        correction=setup.correction,
        discount_updates=DISCOUNT_UPDATES,
    )


def apart(setup: Setup, *, scales: bool = True) -> Emulated:
    """Train by the emulator of ``update_interval="per_replica"``."""
    net = EVERY[setup.net]
    parameters = emulate_apart(
        net.model(), net.cuts[setup.stages], setup.replicas, filled(setup), loss_fn=net.loss_fn,
        make_optimizer=OPTIMIZERS[setup.optimizer], make_scheduler=decay, max_grad_norm=setup.max_grad_norm,
        scales=scales, correction=setup.correction, discount_updates=DISCOUNT_UPDATES,
    )  # fmt: skip
    return Emulated(parameters, {}, [], [])


def unequal(pipeline: Tensors | Emulated, emulator: Emulated) -> list[str]:
    """Names of tensors that differ; all of both sides must be there."""
    found = {**pipeline.parameters, **pipeline.buffers} if isinstance(pipeline, Emulated) else pipeline
    wanted = {**emulator.parameters, **emulator.buffers}
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not same_bits(found[name], wanted[name])]


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
    optimizer, shape = list(OPTIMIZERS)[turn % len(OPTIMIZERS)], list(SHAPES)[(turn + stages) % 3]
    setup = Setup(net, stages, policy, optimizer, shape)
    assert unequal(trained(setup, tmp_path), emulated(setup)) == []


RAGGED: dict[str, Any] = {"shape": "ragged epochs"}
AXES = {
    # By stage where an update has fewer micro-batches than there are stages, else by the whole model.
    "clips each stage": Setup("transformer", 3, "stashing", max_grad_norm=0.45, **RAGGED),
    "clips each stage every second": Setup("transformer", 4, "every second", "adamw", max_grad_norm=0.45, **RAGGED),
    "clips each stage of one version": Setup("transformer", 3, "vertical sync", "adamw", max_grad_norm=0.45, **RAGGED),
    "clips all of two stages": Setup("transformer", 2, "every second", max_grad_norm=0.45, **RAGGED),
    "clips all of four stages": Setup("transformer", 4, "two versions", "adamw", max_grad_norm=0.45, **RAGGED),
    "clips in 2bw": Setup("transformer", 3, "2bw", "adamw", max_grad_norm=0.45, **RAGGED),
    "clips deeper": Setup("transformer", 4, "three versions, deeper", max_grad_norm=0.45, **RAGGED),
    # Versions of bf16 leaves, beside parameters in fp32.
    "bf16": Setup("mlp", 3, "stashing", "adamw", precision="bf16", **RAGGED),
    "bf16 again": Setup("transformer", 3, "vertical sync", "adamw", precision="bf16", recompute="always", **RAGGED),
    "sums": Setup("mlp", 4, "two versions", "adamw", "ragged micro-batches", reduction="sum"),
    "sums in 2bw": Setup("mlp", 4, "2bw", "adamw", "ragged micro-batches", reduction="sum"),
    # After a checkpoint, versions are counted anew.
    "drains": Setup("cnn", 3, "stashing", drain_every=3, **RAGGED),
    "drains every second": Setup("cnn", 3, "every second", drain_every=3, **RAGGED),
    "drains one version": Setup("cnn", 3, "vertical sync", drain_every=3, **RAGGED),
    "drains 2bw": Setup("cnn", 3, "2bw", drain_every=3, **RAGGED),
    # The first stage has done with a mini-batch before the others have, and may be ahead of them by whole ones.
    "frozen": Setup("frozen", 3, "every second", **RAGGED),
    "frozen, drains": Setup("frozen", 3, "stashing", drain_every=3, **RAGGED),
    "frozen, drains 2bw": Setup("frozen", 3, "2bw", drain_every=3, **RAGGED),
    "frozen, deeper": Setup("frozen", 3, "stashing, deeper", **RAGGED),
    # The version of the forward is used again.
    "recomputes": Setup("cnn", 3, "stashing", recompute="always", **RAGGED),
    "recomputes in two versions": Setup("transformer", 3, "two versions", recompute="always", **RAGGED),
    "recomputes in 2bw": Setup("cnn", 3, "2bw", recompute="always", **RAGGED),
    "recomputes deeper": Setup("cnn", 3, "stashing, deeper", recompute="always", **RAGGED),
    # The last mini-batch of an epoch is smaller, and a synchronous step of its own.
    **{
        f"{policy} of {'-'.join(map(str, replicas))}": replicated(
            replicas,
            policy,
            optimizer="sgd" if sum(replicas) % 2 else "adamw",
            shape="twelves" if 3 in replicas else "ragged epochs",
        )
        for replicas in ((2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (1, 2, 2))
        for policy in ("stashing", "2bw")
    },
    "replicas clip": replicated((2, 1), net="transformer", max_grad_norm=0.45, optimizer="adamw", **RAGGED),
    "replicas clip apart": replicated((2, 1, 2), net="transformer", max_grad_norm=0.45, **RAGGED),
    "replicas clip in 2bw": replicated((1, 2), "2bw", net="transformer", max_grad_norm=0.45, **RAGGED),
    "replicas of one version": replicated((1, 2, 1), "vertical sync", optimizer="adamw", **RAGGED),
    "replicas drain": replicated((2, 1), drain_every=3, **RAGGED),
    "replicas update later": replicated((2, 1), update_interval=4, **RAGGED),
    "replicas in more lanes": replicated((2, 1), num_lanes=4, **RAGGED),
    "replicas in bf16": replicated((2, 1), "2bw", net="transformer", precision="bf16", recompute="always", **RAGGED),
    "replicas sum": replicated((2, 2), reduction="sum", **RAGGED),
    "nadam clips": Setup("transformer", 3, "stashing", "nadam", max_grad_norm=0.45, **RAGGED),
    "nadam drains 2bw": Setup("transformer", 4, "2bw", "nadam", drain_every=3, **RAGGED),
    "muon clips": Setup("transformer", 4, "stashing", "muon", max_grad_norm=0.45, **RAGGED),
    "muon clips in 2bw": Setup("transformer", 3, "2bw", "muon", max_grad_norm=0.45, **RAGGED),
    "muon drains": Setup("transformer", 3, "two versions", "muon", drain_every=3, **RAGGED),
    "muon in bf16": Setup("transformer", 3, "stashing", "muon", precision="bf16", **RAGGED),
    "muon of replicas": replicated((2, 1), "2bw", optimizer="muon", net="transformer", max_grad_norm=0.45, **RAGGED),
    **{
        f"{optimizer} predicts in {policy}": Setup("transformer", 3, policy, optimizer, correction="predict", **RAGGED)
        for optimizer, policy in zip(itertools.cycle(OPTIMIZERS), list(POLICIES)[1:])
    },
    "predicts and clips": Setup("transformer", 3, "2bw", "adamw", max_grad_norm=0.45, correction="predict", **RAGGED),
    "predicts and drains": Setup("cnn", 3, "stashing", drain_every=3, correction="predict", **RAGGED),
    "predicts and drains 2bw": Setup("cnn", 4, "2bw", "adamw", drain_every=3, correction="predict", **RAGGED),
    "predicts in bf16": Setup("transformer", 3, "stashing", "adamw", precision="bf16", correction="predict", **RAGGED),
    "predicts and recomputes": Setup("cnn", 3, "2bw", recompute="always", correction="predict", **RAGGED),
    "predicts, frozen": Setup("frozen", 3, "every second", correction="predict", **RAGGED),
    "predicts, frozen, of one version": replicated(
        (1, 2, 1), "vertical sync", net="frozen", correction="predict", **RAGGED
    ),
    "predicts in replicas": replicated((2, 1), correction="predict", optimizer="adamw", **RAGGED),
    "predicts in replicas of 2bw": replicated((1, 2), "2bw", correction="predict", optimizer="muon", **RAGGED),
    "predicts in replicas later": replicated((2, 1, 1), correction="predict", update_interval=4, **RAGGED),
    "discounts": Setup("mlp", 4, "stashing", "nadam", correction="discount", **RAGGED),
    "discounts and clips": Setup("transformer", 3, "stashing", "muon", max_grad_norm=0.45, correction="discount"),
    "discounts and drains": Setup("cnn", 4, "stashing", drain_every=3, correction="discount", **RAGGED),
    "discounts, deeper": Setup("mlp", 3, "stashing, deeper", "adamw", correction="discount", **RAGGED),
    "discounts in replicas": replicated((1, 1, 2), correction="discount", optimizer="adamw", **RAGGED),
    # They make updates too, of nothing, and wait for nobody; versions are those of the first stage that learns.
    "frozen replicas": replicated((2, 1, 1), net="frozen", drain_every=3, **RAGGED),
    "frozen replicas of one version": replicated((1, 2, 1), "vertical sync", net="frozen", drain_every=3, **RAGGED),
    "frozen replicas in 2bw": replicated((2, 2, 1), "2bw", net="frozen", drain_every=3, **RAGGED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AXES)
def test_every_axis(name: str, tmp_path: Path) -> None:
    setup = AXES[name]
    wanted = emulated(setup)
    assert unequal(trained(setup, tmp_path), wanted) == []
    plain = {"max_grad_norm": None, "precision": "fp32", "reduction": "mean", "drain_every": None, "correction": "none"}
    without = replace(setup, **plain, recompute="auto")  # type: ignore[arg-type]
    if without != replace(setup, recompute="auto"):
        assert unequal(emulated(without), wanted), "the axis has no effect"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_version_shifted_by_one_is_seen(tmp_path: Path, policy: str) -> None:
    """One micro-batch on one stage, one update older."""
    setup = Setup(policy=policy)
    found, mode = trained(setup, tmp_path), setup.mode
    for stage in range(setup.stages):
        k = next(k for k in itertools.count() if mode.version(stage, k) > 0)
        assert unequal(found, emulated(setup, shifted(mode, {(stage, k): -1}))), f"stage {stage}"


@pytest.mark.slow
def test_2bw_reports_the_same_losses_however_many_replicas(tmp_path: Path) -> None:
    """Its versions do not depend on how far stages run ahead."""
    told = []
    for replicas in ((1, 1), (2, 1), (2, 2)):
        trained(replicated(replicas, "2bw", num_lanes=2, **RAGGED), tmp_path / str(replicas))
        rows = pq.read_table(tmp_path / str(replicas) / "run" / "metrics.parquet").to_pylist()
        told.append([(row["loss"], row["grad_norm"]) for row in rows])
    assert told[1:] == told[:1] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        ((2, 1), {"optimizer": "sgd"}),
        ((2, 1), {"optimizer": "adamw", "shape": "ragged epochs", "drain_every": 3}),
        ((1, 2), {"optimizer": "adamw", "shape": "ragged micro-batches"}),
        ((2, 1, 1), {"optimizer": "adamw", "max_grad_norm": 0.2, "shape": "ragged epochs"}),
        ((2, 3), {"optimizer": "sgd", "shape": "twelves", "microbatches": 6}),
        ((2, 1, 1), {"optimizer": "nadam", "correction": "predict", "shape": "ragged epochs"}),
        ((1, 1, 2), {"optimizer": "adamw", "correction": "discount", "shape": "ragged epochs", "drain_every": 3}),
    ],
)
def test_stages_update_as_often_as_their_replicas_are_done(
    tmp_path: Path, replicas: tuple[int, ...], more: dict[str, Any]
) -> None:
    """As published, with the learning rate scaled; without that, and without the limit, the weights are others."""
    setup = replicated(replicas, update_interval="per_replica", **{"microbatches": MICROBATCHES} | more)
    found = trained(setup, tmp_path)
    assert unequal(found, apart(setup)) == []
    assert unequal(found, apart(setup, scales=False))
    assert setup.max_grad_norm is None or unequal(found, apart(replace(setup, max_grad_norm=None)))


def test_updates_per_replica_of_a_loss_that_counts_are_refused(tmp_path: Path) -> None:
    """Only the last stage could weigh them."""
    words = "update_interval='per_replica' with a loss that averages over labels other than -100"
    with pytest.raises(ConfigError, match=words):
        trained(replicated((2, 1), reduction="auto", update_interval="per_replica"), tmp_path)
