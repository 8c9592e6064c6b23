"""What a worker takes of the cluster, and which wishes for GPUs are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config.ray import check_ray_settings, gpu_share, resources_of
from raypipe.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "resources", "share"),
    [
        ({}, {"CPU": 1}, 0.0),
        ({"resources_per_worker": {"CPU": 2, "rack": 1}}, {"CPU": 2, "rack": 1}, 0.0),
        ({"use_gpu": True}, {"CPU": 1, "GPU": 1}, 1.0),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, {"CPU": 1, "GPU": 0.5}, 0.5),
        ({"use_gpu": True, "accelerator_type": "A100"}, {"CPU": 1, "GPU": 1, "accelerator_type:A100": 0.001}, 1.0),
    ],
)
def test_what_a_worker_takes(fields: dict[str, Any], resources: dict[str, float], share: float) -> None:
    assert resources_of(None) == {"CPU": 1}
    found = resources_of(SimpleNamespace(num_workers=2, **fields))
    assert found == resources
    assert gpu_share(found) == share


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_gpu": True, "resources_per_worker": {"GPU": 2}}, "a worker computes on one GPU, so that 2 would leave"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "use_gpu=True needs at least a share of a GPU"),
        ({"use_gpu": True, "accelerator_type": 100}, "give the name of a kind of GPU"),
        ({"use_gpu": "yes"}, "it places stages on GPUs; give True or False"),
        ({"use_tpu": True}, "it would have no effect: stages compute on CPUs and on NVIDIA GPUs"),
    ],
)
def test_what_would_have_no_effect_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"ScalingConfig\((use_|resources|accel)") as caught:
        check_ray_settings(SimpleNamespace(num_workers=2, **fields), None)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["a/b", "..", " ", 3])
def test_the_name_of_a_run_is_one_folder(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"RunConfig\(name=.*it is the name of one folder"):
        check_ray_settings(None, SimpleNamespace(name=name))
    check_ray_settings(None, SimpleNamespace(name="a b.c-3"))
    check_ray_settings(None, SimpleNamespace(name=None))
