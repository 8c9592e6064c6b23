"""Workers on the GPUs that Ray gives them. Ray's are only numbers here, and the workers' device is a fake one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.device import CPU, Device
from raypipe.errors import ConfigError
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.granted import index_of
from tests import nets
from tests.exactness import same_bits
from tests.fake_device import FakeDevice
from tests.models import vectors
from tests.runtime.on_fleet import start_on
from tests.runtime.run.test_planning import adamw

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

HALF = {"CPU": 0.0, "GPU": 0.5, "spare": 0.1}
STEPS = 4


@pytest.mark.parametrize(
    ("ids", "visible", "index"),
    [
        (["2"], "2", 0),
        (["3"], "2, 3", 1),  # Ray was told not to change what is visible, and its nodes show some GPUs only
        (["1"], None, 1),  # the same, and they show all
        (["GPU-5a"], "GPU-77,GPU-5a", 1),
        (["GPU-5a"], None, None),
        (["2"], "", None),
        ([], "0", None),
    ],
)
def test_a_gpu_is_found_among_those_that_torch_sees(ids: list[str], visible: str | None, index: int | None) -> None:
    assert index_of(ids, visible) == index


def pretended(share: float) -> Device:
    """A device that says which GPU this process would see."""
    device = FakeDevice(eager=False)
    device.title = f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}"
    device.memory_bytes = int(share * 1024)
    return device


def trained(folder: Path, name: str) -> PipelineTrainer:
    torch.manual_seed(0)
    pipeline = PipelineConfig(num_stages=3, minibatch_size=8, num_microbatches=4, partitioner="parameters")
    return PipelineTrainer(
        nets.sequential(), loss_fn=torch.nn.functional.cross_entropy, optimizer=adamw, train_data=vectors(32),
        pipeline=pipeline, run_config=SimpleNamespace(name=name, storage_path=str(folder)),
    )  # fmt: skip


def test_workers_share_gpus_and_compute_the_bits_of_the_cpu(local_ray: None, tmp_path: Path) -> None:
    """State, snapshots and copies lie on the device; those who read them wait, or their bits would be others."""
    fleet = Fleet(3, HALF, device_of=pretended)
    try:
        seen = [facts["device"] for facts in fleet.facts]
        assert len(set(seen)) == 2  # the third has a GPU of its own
        assert set(seen) <= {f"GPU {number}" for number in range(4)}
        assert [facts["device_bytes"] for facts in fleet.facts] == [512] * 3
        handle = start_on(fleet, trained(tmp_path, "late"), STEPS)
        found = load_state_dict(handle.wait().checkpoint)
        fleet.keep_copy(STEPS)
        assert {step for _, facts in fleet.copies() for step in facts.steps} == {STEPS}
        for actor, facts in fleet.copies():
            if not facts.held:
                header = ray.get(actor.copy_header.remote(facts.generation, facts.stage, STEPS))
                assert b'"step"' in header
    finally:
        fleet.stop()
    alone = trained(tmp_path, "alone").fit(STEPS, local=True, progress=False)
    wanted = load_state_dict(alone.checkpoint)
    assert [key for key in wanted if not same_bits(found[key], wanted[key])] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_on_which_torch_cannot_compute_is_named(local_ray: None) -> None:
    with pytest.raises(ConfigError, match=r"ScalingConfig\(use_gpu=True\): Ray gave a worker on .* a GPU") as caught:
        Fleet(1, HALF)
    assert "torch" in str(caught.value)
    assert "use_gpu=False" in str(caught.value)


def test_a_worker_without_a_share_computes_on_the_cpu(fleet: Fleet) -> None:
    assert {facts["device"] for facts in fleet.facts} == {CPU.title}
