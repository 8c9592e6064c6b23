"""Plans keep to the memory of the devices that workers have, of several kinds too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raypipe import PipelineConfig
from raypipe.api.devices import in_threads, on_devices
from raypipe.engine.device.cuda_device import CONTEXT_BYTES, share_of
from raypipe.engine.device.device import CPU
from raypipe.errors import ConfigError, PlanError
from raypipe.ir.plan import Plan
from raypipe.run.plans.later import Offered, within
from raypipe.run.plans.planning import PlanBasis
from raypipe.run.spec import Planned
from tests.models import vectors
from tests.trainers import adamw, trainer_of

GPU = {"CPU": 1.0, "GPU": 0.5}


@pytest.fixture(scope="module")
def made() -> tuple[PlanBasis, Planned]:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 64), *(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 3)]
    trainer = trainer_of(nn.Sequential(*layers), optimizer=adamw, train_data=vectors(32), partitioner="prefix_sum")
    job = trainer._prepared()
    return job.basis, job.planned


def needs(planned: Planned) -> list[int]:
    assert planned.plan.prediction is not None
    return [stage.memory_bytes for stage in planned.plan.prediction.stages]


def test_a_plan_that_fits_stays_and_later_ones_keep_to_the_smallest_device(made: tuple[PlanBasis, Planned]) -> None:
    basis, planned = made
    found = within(basis, planned, [Offered("large", 1 << 40), Offered("small", max(needs(planned)))])
    assert found.planned is planned
    assert (found.members, found.why) == (None, "")
    assert found.basis.request.memory_limit_bytes == max(needs(planned))
    assert within(basis, planned, [Offered("CPU"), Offered("CPU")]).basis is basis


def test_devices_of_two_kinds_get_a_plan_that_each_can_hold(made: tuple[PlanBasis, Planned]) -> None:
    basis, planned = made
    least, most = int(0.6 * max(needs(planned))), 2 * sum(needs(planned))
    offered = [Offered("small", least), Offered("large", most)]
    found = within(basis, planned, offered)
    assert found.members is not None
    assert sorted(found.members) == [0, 1]
    for need, member in zip(needs(found.planned), found.members, strict=True):
        assert need <= (offered[member].memory_bytes or 0)
    assert "offers" in found.why
    assert found.planned.plan.num_microbatches == planned.plan.num_microbatches
    assert found.planned.plan.schedule.num_workers == 2


def test_devices_that_hold_no_plan_are_named_with_bytes_and_field(made: tuple[PlanBasis, Planned]) -> None:
    basis, planned = made
    with pytest.raises(PlanError, match=r"Worker 0 was planned to hold .*iB, and its device, tiny, offers 1.0 KiB"):
        within(basis, planned, [Offered("tiny", 1024)] * 2)


def test_shares_of_a_gpu_divide_its_memory() -> None:
    assert share_of("GPU", 80 << 30, 1.0) == (80 << 30) - CONTEXT_BYTES
    assert 2 * share_of("GPU", 80 << 30, 0.5) == (80 << 30) - 2 * CONTEXT_BYTES
    with pytest.raises(ConfigError, match=r"A share of 0.1 of GPU is 409.6 MiB, and CUDA takes about 768.0 MiB"):
        share_of("GPU", 4 << 30, 0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_gpus_counts_in_their_seconds() -> None:
    def planned(**places: Any) -> Plan:
        layers = [nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3)]
        config = SimpleNamespace(num_workers=2, **places)
        fields = {"minibatch_size": 64, "schedule": "1f1b", "partitioner": "auto"}
        return trainer_of(nn.Sequential(*layers), train_data=vectors(64), scaling_config=config, **fields).plan()

    assert not any("data sheet" in note for note in planned().notes)
    made, again, slower = (planned(use_gpu=True, accelerator_type=kind) for kind in ("A100", "A100", "P4"))
    (note,) = [note for note in made.notes if "data sheet" in note]
    assert note.startswith("Seconds are estimated for A100 by its data sheet")
    assert made.prediction is not None
    assert slower.prediction is not None
    assert made.prediction == again.prediction  # nothing was timed
    assert made.prediction.step_s < slower.prediction.step_s


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_here_the_workers_say_what_there_is_and_threads_are_refused() -> None:
    config = PipelineConfig(num_stages=2)
    assert on_devices(config, GPU) is config
    assert in_threads({"CPU": 1.0})(3) is CPU
    words = (
        r"use_gpu=True\) with local=True: worker 0, a thread of this process, cannot compute on GPU 0 of this machine"
    )
    with pytest.raises(ConfigError, match=words + ", which 2 workers share: torch"):
        in_threads(GPU)(0)
    with pytest.raises(ConfigError, match=r"worker 3, .* on GPU 3 of this machine: torch .* With use_gpu=False"):
        in_threads({"GPU": 1.0})(3)
    config = SimpleNamespace(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    trainer = trainer_of(model, train_data=vectors(8), scaling_config=config)
    with pytest.raises(ConfigError, match=words):
        trainer.fit(1, local=True, progress=False)
