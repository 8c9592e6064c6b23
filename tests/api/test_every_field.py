"""Every field of PipelineConfig and of Ray's settings changes what a run is told, or is refused by its name.

What a run is told: the plan, what each worker is set up with, what the controller may turn, and what is saved where.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train import ScalingConfig
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.config.pipeline import _ALLOWED, SUPPORTED
from raypipe.config.ray import READ, failures_of, worker_range
from raypipe.errors import ConfigError, PlanError, RaypipeError
from raypipe.prepare.policies import checkpoint_policy
from raypipe.run.plans.blueprint import controller_config
from tests import nets

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_captures")]

BASE: dict[str, Any] = {
    "num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters", "loss_reduction": "mean",
}  # fmt: skip
DATA = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
RANDOM = ("run_id", "secret")
"""What is new in every setup."""


def trainer(pipeline: PipelineConfig | None = None, **more: Any) -> PipelineTrainer:
    torch.manual_seed(0)  # equal models share a capture
    if pipeline is not None and pipeline.eval_interval_steps:
        more["eval_data"] = DATA
    on_workers = pipeline is not None and pipeline.weights_on == "workers"  # which takes a function without weights
    traced = pipeline is not None and (pipeline.compile_stages != "off" or pipeline.cuda_graphs)  # no nn.Sequential
    if pipeline is not None and pipeline.cuda_graphs:
        more["scaling_config"] = ScalingConfig(num_workers=2, use_gpu=True)
    return PipelineTrainer(
        nets.sequential if on_workers else nets.Mlp() if traced else nets.sequential(),
        loss_fn=functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train_data=DATA, pipeline=pipeline or PipelineConfig(**BASE), **more,
    )  # fmt: skip


def told(made: PipelineTrainer) -> str:
    """All that differs between two runs, but for measured seconds."""
    job = made._prepared()
    setups = job.run_setup(made._storage(), made._pipeline), job.generation_setup()
    fields = [(setup, f.name) for setup in setups for f in dataclasses.fields(setup) if f.name not in RANDOM]
    worker = [(name, getattr(setup, name)) for setup, name in fields]
    kept = [(name, value) for name, value in worker if name not in ("programs", "sources", "place")]
    source = vars(job.sources["train"])
    order = [source[name] for name in ("_seed", "_shuffle")]
    place = str(setups[0].place), getattr(made._run, "name", None)
    plan = dataclasses.replace(job.plan, notes=(), reasons=(), prediction=None)
    policy = checkpoint_policy(made._pipeline, getattr(made._run, "checkpoint_config", None))
    survived = failures_of(made._run), worker_range(made._scaling)
    turned = controller_config(made._pipeline, job.planned)
    if turned is not None:
        turned = dataclasses.replace(turned, microbatch_seconds=tuple(n for n, _ in turned.microbatch_seconds))  # type: ignore[arg-type]
    # The first word of "All 7 operations were measured", "Of 7 operations 5 were".
    profiled = [why.split()[0] for what, why in job.plan.reasons if what == "profile"]
    told_first = plan, kept, order, place, policy, survived, turned, made._evaluations
    called = [type(callback).__name__ for callback in made._callbacks]
    waits = made._pipeline.resource_timeout_s
    return repr((told_first, called, made._resources(), checks(job), profiled, waits))


def checks(job: Any) -> bool:
    """Whether the user's own model runs before training begins."""
    calls: list[Any] = []
    with register_module_forward_hook(lambda *call: calls.append(call)):
        job.check()
    return bool(calls)


def told_of(**fields: Any) -> str:
    return told(trainer(PipelineConfig(**{**BASE, **fields})))


# Of every field, values that each mean something else; what goes with them stands before.
EFFECTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "num_stages": ({}, [1, 2, 3]),
    "num_replicas": ({}, [1, 2, [1, 2]]),
    "num_lanes": ({}, ["auto", 2, 3]),
    "codec_sums": ({"num_lanes": 2}, ["none", "bf16"]),
    "shard_optimizer": ({"num_replicas": 2}, [False, True]),
    "replicated_buffers": ({"num_replicas": 2}, [False, True]),
    "minibatch_size": ({}, [8, 16]),
    "num_microbatches": ({}, [2, 4]),
    "profile_budget_s": ({"partitioner": "auto", "num_microbatches": "auto"}, [0.0001, 60.0]),
    "loss_reduction": ({}, ["mean", "sum", "valid_tokens", "per_microbatch", len]),
    "loss_over": ({"loss_reduction": "auto"}, ["microbatch", "minibatch"]),
    "partitioner": ({"num_stages": "auto"}, ["parameters", ["2"], ["4"]]),
    "schedule": ({}, list(SUPPORTED["schedule"][:-3] + SUPPORTED["schedule"][-2:])),
    "group_size": ({"schedule": "kfkb"}, ["auto", 1, 2, 3]),
    "slack": ({"schedule": "slack"}, [1, 2, [3]]),
    "weight_versions": ({"schedule": "pipedream", "num_stages": 3}, [1, 2, 3]),
    "update_interval": ({"schedule": "pipedream"}, [1, 2, 3]),
    "vertical_sync": ({"schedule": "pipedream"}, [False, True]),
    "stale_correction": ({"schedule": "pipedream", "num_stages": 3}, ["none", "predict", "discount"]),
    "discount_updates": ({"schedule": "pipedream", "num_stages": 3, "stale_correction": "discount"}, [5, 1000]),
    "transport": ({}, list(SUPPORTED["transport"])),
    "link_ports": ({}, ["auto", [20000, 20010], [20000, 20020]]),
    "link_checksum": ({}, ["auto", "on", "off"]),
    "codec_forward": ({}, ["auto", *SUPPORTED["codec_forward"]]),
    "codec_backward": ({}, ["auto", *SUPPORTED["codec_backward"]]),
    "memory_limit_bytes": ({}, ["auto", 1]),
    "recompute": ({}, ["never", "always", ["never", "always"], [True, False]]),
    "precision": ({}, list(SUPPORTED["precision"])),
    "compile_stages": ({}, ["off", "inductor", "aot_eager"]),
    "cuda_graphs": ({"schedule": "1f1b"}, [False, True]),
    "weights_on": ({}, ["client", "workers"]),
    "max_grad_norm": ({}, [None, 0.5, 2]),
    "retune_interval_steps": ({}, ["auto", 0, 7]),
    "link_drift_threshold": ({}, ["auto", 0.1]),
    "min_gain": ({}, ["auto", 0.1]),
    "retune_microbatches": ({}, [False, True]),
    "checkpoint_interval_steps": ({}, ["auto", 5]),
    "eval_interval_steps": ({}, [None, 5, 10]),
    "seed": ({}, [0, 1]),
    "on_nonfinite": ({}, ["stop", "skip"]),
    "driver_grace_s": ({}, [5, 60.0, 90]),
    "resource_timeout_s": ({}, ["auto", None, 5, 60.0]),
    "worker_price_per_hour": ({}, [None, 0.5, 3]),
    "verify": ({}, ["first_step", "off"]),
}


def outcome(**fields: Any) -> str:
    """What a run is told, or why there is none."""
    try:
        return told_of(**fields)
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PipelineConfig)])
def test_every_value_of_every_field_makes_another_run(name: str) -> None:
    beside, values = EFFECTS[name]
    found = {repr(value): outcome(**{**beside, name: value}) for value in values}
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first != second, f"{name}={one} and {name}={other} are the same run"


# Values that a release to come runs, and every other one that a name stands for.


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PipelineConfig)])
def test_every_word_that_a_field_takes_is_tried(name: str) -> None:
    """So that a new one cannot slip in without an effect."""
    _, values = EFFECTS[name]
    tried = {value for value in (*values, "auto") if isinstance(value, str)}
    tried |= {"prefix_sum", "antichain"}  # ways to find the cut: tests/planner/search/test_choose.py
    tried |= {"per_replica"}  # of stages with replicas: tests/runs/test_asynchronous.py
    tried |= {"zb-v"}  # for two stages on each worker: tests/runs/test_exactness.py
    assert set(_ALLOWED[name].names) <= tried


FURTHER: dict[str, Any] = {
    "group_size": 3, "slack": 3, "weight_versions": 2, "update_interval": 3, "vertical_sync": True,
    "stale_correction": "predict", "discount_updates": 5,
    "codec_forward": "auto", "codec_backward": "auto", "retune_interval_steps": 7, "link_drift_threshold": 0.1,
    "min_gain": 0.1, "retune_microbatches": True, "num_replicas": [2, 1], "num_lanes": 2,
    "codec_sums": "bf16", "on_nonfinite": "skip",
}  # fmt: skip
SAYS_WHAT_IS_SO = {("weight_versions", "2bw"), ("vertical_sync", "2bw"), ("weight_versions", "pipedream")}
"""2bw has two versions, the same on every stage; two are the most that pipedream keeps on two stages."""


def refusal_or_told(**fields: Any) -> tuple[str, str]:
    try:
        return "", told_of(**fields)
    except RaypipeError as error:
        return str(error), ""


@pytest.mark.parametrize("schedule", ["auto", *SUPPORTED["schedule"]])
def test_no_schedule_takes_a_field_that_it_ignores(schedule: str) -> None:
    plain = told_of(schedule=schedule)
    ignored, unnamed = [], []
    for name, value in FURTHER.items():
        if (name, schedule) not in SAYS_WHAT_IS_SO:
            refused, found = refusal_or_told(**{"schedule": schedule, name: value})
            ignored += [name] * (found == plain)
            unnamed += [refused] * (refused != "" and not refused.startswith(f"{name}="))
    assert ignored == []
    assert unnamed == []


def ray_trainer(kind: str, **fields: Any) -> PipelineTrainer:
    """A trainer with these fields in one of Ray's own classes."""
    made = getattr(ray.train, kind)(**fields)
    if kind == "ScalingConfig":
        return trainer(PipelineConfig(**{**BASE, "num_stages": "auto"}), scaling_config=made)
    if kind == "CheckpointConfig":
        made = ray.train.RunConfig(name="run", storage_path="runs", checkpoint_config=made)
    if kind == "FailureConfig":
        made = ray.train.RunConfig(name="run", storage_path="runs", failure_config=made)
    return trainer(run_config=made, eval_data=DATA)


RAY_EFFECTS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("ScalingConfig", "num_workers"): [{"num_workers": 2}, {"num_workers": 3}, {"num_workers": (2, 3)}],
    ("ScalingConfig", "elastic_resize_monitor_interval_s"): [
        {"num_workers": (2, 3)}, {"num_workers": (2, 3), "elastic_resize_monitor_interval_s": 5.0},
    ],
    ("ScalingConfig", "resources_per_worker"): [
        {"num_workers": 2}, {"num_workers": 2, "resources_per_worker": {"CPU": 0.1}},
    ],
    ("ScalingConfig", "use_gpu"): [{"num_workers": 2}, {"num_workers": 2, "use_gpu": True}],
    ("ScalingConfig", "accelerator_type"): [
        {"num_workers": 2, "use_gpu": True, "accelerator_type": kind} for kind in ("A100", "H100")
    ],
    ("RunConfig", "name"): [{"name": "a"}, {"name": "b"}],
    ("RunConfig", "callbacks"): [{"callbacks": []}, {"callbacks": [ray.train.UserCallback()]}],
    ("RunConfig", "storage_path"): [{"name": "a", "storage_path": "one"}, {"name": "a", "storage_path": "two"}],
    ("RunConfig", "storage_filesystem"): [
        {"name": "a", "storage_path": "one"},
        {"name": "a", "storage_path": "one", "storage_filesystem": pyarrow.fs.LocalFileSystem()},
    ],
    ("RunConfig", "checkpoint_config"): [
        {"name": "a"}, {"name": "a", "checkpoint_config": ray.train.CheckpointConfig(num_to_keep=2)},
    ],
    ("RunConfig", "failure_config"): [
        {"name": "a"}, {"name": "a", "failure_config": ray.train.FailureConfig(max_failures=2)},
    ],
    ("FailureConfig", "max_failures"): [{}, {"max_failures": 2}, {"max_failures": -1}],
    ("CheckpointConfig", "num_to_keep"): [{}, {"num_to_keep": 2}],
    ("CheckpointConfig", "checkpoint_score_attribute"): [
        {"num_to_keep": 2}, {"num_to_keep": 2, "checkpoint_score_attribute": "loss"},
        {"num_to_keep": 2, "checkpoint_score_attribute": "eval_loss"},
    ],
    ("CheckpointConfig", "checkpoint_score_order"): [
        {"num_to_keep": 2, "checkpoint_score_attribute": "loss", "checkpoint_score_order": order}
        for order in ("max", "min")
    ],
}  # fmt: skip

# Of every other field, what says something; Ray itself refuses what is "DEPRECATED" before we see it.
SAID: dict[tuple[str, str], Any] = {
    ("ScalingConfig", "trainer_resources"): {"CPU": 2},
    ("ScalingConfig", "placement_strategy"): "SPREAD",
    ("ScalingConfig", "label_selector"): {"zone": "a"},
    ("ScalingConfig", "use_tpu"): True,
    ("ScalingConfig", "topology"): "4x4",
    ("RunConfig", "worker_runtime_env"): {"env_vars": {"A": "1"}},
    ("RunConfig", "logging_config"): ray.train.LoggingConfig(log_level="DEBUG"),
    ("FailureConfig", "controller_failure_limit"): 3,
    ("FailureConfig", "max_preemption_failures"): 3,
    ("FailureConfig", "relax_collectives_on_preemption"): True,
    ("FailureConfig", "preemption_grace_s"): 3.0,
}
FIELDS = [(kind, field.name) for kind in READ for field in dataclasses.fields(getattr(ray.train, kind))]


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_every_field_of_rays_settings_has_an_effect_or_is_refused(kind: str, name: str) -> None:
    if name in READ[kind]:
        found = [told(ray_trainer(kind, **fields)) for fields in RAY_EFFECTS[kind, name]]
        assert len(set(found)) == len(found) > 1
        return
    fresh = getattr(ray.train, kind)(**({"num_workers": 2} if kind == "ScalingConfig" else {}))
    if (kind, name) not in SAID:
        assert getattr(fresh, name) == "DEPRECATED"
    setattr(fresh, name, SAID.get((kind, name), "something"))  # past Ray's own checks, some of which ask for hardware
    within = {"FailureConfig": "failure_config", "CheckpointConfig": "checkpoint_config"}.get(kind)
    given = ray.train.RunConfig(**{within: fresh}) if within else fresh
    refused = f"{kind}({name}={SAID.get((kind, name), 'something')!r})"
    with pytest.raises(ConfigError) as caught:
        trainer(**{"scaling_config" if kind == "ScalingConfig" else "run_config": given})
    assert str(caught.value).startswith(f"{refused}: it would have no effect: ")
    assert len(str(caught.value)) < 500


def test_settings_that_say_nothing_are_taken() -> None:
    told(trainer(scaling_config=ray.train.ScalingConfig(num_workers=2), run_config=ray.train.RunConfig()))
    quiet = ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=0), callbacks=[])
    told(trainer(run_config=quiet))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scaling_config": SimpleNamespace(num_workers=2, resources_per_worker={"CPU": 1, "GPU": 1})},
            "ScalingConfig(resources_per_worker={'CPU': 1, 'GPU': 1}): a GPU would be reserved and left idle. Set "
            "use_gpu=True, or leave out 'GPU'.",
        ),
        (
            {"scaling_config": SimpleNamespace(num_workers=(8, 2))},
            "ScalingConfig(num_workers=(8, 2)): a pair is the least and the most workers; give two integers, the first "
            "from 1 on, as in (2, 8).",
        ),
        (
            {"scaling_config": ray.train.ScalingConfig(num_workers=2, elastic_resize_monitor_interval_s=5.0)},
            "ScalingConfig(elastic_resize_monitor_interval_s=5.0): it would have no effect: a run with one number of "
            "workers does not look for more. Give a pair, as in num_workers=(2, 8), or leave it out.",
        ),
        (
            {"scaling_config": SimpleNamespace(num_workers=(2, 8), elastic_resize_monitor_interval_s=-1)},
            "ScalingConfig(elastic_resize_monitor_interval_s=-1): it is the seconds between two looks for more "
            "workers; give a number from 0 on.",
        ),
        (
            {"scaling_config": {"num_workers": 2}},
            "scaling_config is dict {'num_workers': 2}; give ray.train.ScalingConfig(num_workers=2).",
        ),
        (
            {"scaling_config": SimpleNamespace(num_workers=0)},
            "ScalingConfig(num_workers=0): it is the number of places for stages; give an integer of at least 1, "
            "or a pair as in (2, 8).",
        ),
        (
            {"scaling_config": SimpleNamespace(num_workers=2, resources_per_worker={"CPU": "all"})},
            "ScalingConfig(resources_per_worker={'CPU': 'all'}): it is what a worker reserves of each resource, as in "
            "{'CPU': 1}; give numbers from 0 on by name.",
        ),
        (
            {"run_config": ray.train.ScalingConfig(num_workers=2)},
            "RunConfig(num_workers=2): it would have no effect: raypipe does not read it. Leave it out; of RunConfig "
            "raypipe reads name, storage_path, storage_filesystem, checkpoint_config, failure_config, callbacks.",
        ),
        (
            {"run_config": SimpleNamespace(checkpoint_config=SimpleNamespace(checkpoint_score_attribute="loss"))},
            "CheckpointConfig(checkpoint_score_attribute='loss'): it ranks checkpoints, but without num_to_keep "
            "all are. Give num_to_keep too.",
        ),
        (
            {
                "run_config": SimpleNamespace(
                    checkpoint_config=SimpleNamespace(num_to_keep=1, checkpoint_score_attribute="accuracy")
                )
            },
            "CheckpointConfig(checkpoint_score_attribute='accuracy'): no checkpoint has such a number; give one of "
            "loss, grad_norm, eval_loss, or eval_<name> of a metric.",
        ),
        (
            {
                "run_config": SimpleNamespace(
                    checkpoint_config=SimpleNamespace(num_to_keep=1, checkpoint_score_attribute="eval_loss")
                )
            },
            "CheckpointConfig(checkpoint_score_attribute='eval_loss'): there is no eval_loss without eval_data. Give "
            "eval_data, or 'loss' as the attribute.",
        ),
        (
            {"run_config": SimpleNamespace(checkpoint_config=SimpleNamespace(checkpoint_score_order="min"))},
            "CheckpointConfig(checkpoint_score_order='min'): it orders by checkpoint_score_attribute, which is not "
            "given. Give 'loss' or 'eval_loss' there.",
        ),
    ],
)
def test_refusals_of_rays_settings_whole(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before anything is looked at, so that it is the same with local=True."""
    with pytest.raises(ConfigError) as caught:
        trainer(**arguments)
    assert str(caught.value) == message
    assert caught.value.__cause__ is None
