"""Asynchronous pipelines with replicas end with the weights of their emulator, which imports nothing of raypipe."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from raypipe.engine.data.source import open_data
from raypipe.errors import ConfigError
from tests.emulators.apart import emulate_apart
from tests.emulators.fills import fills_of
from tests.emulators.nets import NETS, frozen_first
from tests.emulators.training import Emulated
from tests.emulators.versions import Mode, round_robin, two_buffered
from tests.runs.test_asynchronous import OPTIMIZERS, SHAPES, STEPS, Setup, decay, emulated, trained, unequal

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

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


@pytest.mark.parametrize("policy", [PIPEDREAM, BUFFERED])
@pytest.mark.parametrize("replicas", PLACED)
def test_weights_are_the_emulators(tmp_path: Path, replicas: tuple[int, ...], policy: str) -> None:
    """The last mini-batch of an epoch is smaller, and a synchronous step of its own."""
    shape = "twelves" if 3 in replicas else "ragged epochs"
    optimizer = "sgd" if sum(replicas) % 2 else "adamw"
    found, wanted = pair(tmp_path, replicas, policy, shape=shape, optimizer=optimizer)
    assert unequal(found, wanted) == []


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


def test_2bw_has_the_same_bits_however_many_replicas(tmp_path: Path) -> None:
    """Its versions do not depend on how far stages run ahead."""
    setup = Setup(stages=2, policy=BUFFERED, shape="ragged epochs")
    alone, told = trained(setup, tmp_path / "alone", num_lanes=2), losses(tmp_path / "alone")
    for replicas in ([2, 1], [1, 2], [2, 2]):
        found = trained(setup, tmp_path / str(replicas), num_replicas=replicas, num_lanes=2)
        assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
        assert losses(tmp_path / str(replicas)) == told
    assert SHAPES["ragged epochs"][0] % SHAPES["ragged epochs"][1], "the smaller mini-batch is part of it"


def test_a_version_shifted_by_one_is_seen(tmp_path: Path) -> None:
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


def test_updates_per_replica_of_a_loss_that_counts_are_refused(tmp_path: Path) -> None:
    """Only the last stage could weigh them."""
    setup = Setup(stages=2, policy=PIPEDREAM, reduction="auto")
    with pytest.raises(
        ConfigError, match=r"update_interval='per_replica' with a loss that averages over labels other than -100"
    ):
        trained(setup, tmp_path, num_replicas=[2, 1], update_interval="per_replica")
