"""Every refusal names field and value and says what is allowed; every default is accepted."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from raypipe.config.pipeline import _ALLOWED, SUPPORTED, PipelineConfig
from raypipe.errors import ConfigError


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(**values)
    return str(caught.value)


def test_tables_speak_of_exactly_the_fields() -> None:
    names = [field.name for field in dataclasses.fields(PipelineConfig)]
    assert list(_ALLOWED) == names
    assert set(SUPPORTED) <= set(names)


def test_every_supported_value_is_accepted() -> None:
    for name, values in SUPPORTED.items():
        for value in values:
            assert getattr(PipelineConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name", [n for n, rule in _ALLOWED.items() if rule.accepts("auto")])
def test_auto_is_always_accepted(name: str) -> None:
    assert getattr(PipelineConfig(**{name: "auto"}), name) == "auto"


def test_unknown_field_is_refused_with_the_nearest_name() -> None:
    message = refusal(num_microbatch=4)
    assert "'num_microbatch'" in message
    assert "Did you mean 'num_microbatches'?" in message
    assert "Did you mean" not in refusal(qqq=1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_stages": 0}, ["num_stages=0", "an integer of at least 1"]),
        ({"num_stages": "2"}, ["num_stages='2'", "an integer of at least 1"]),
        ({"num_stages": True}, ["num_stages=True"]),
        ({"num_stages": 2.0}, ["num_stages=2.0"]),
        ({"schedule": "1F1B"}, ["schedule='1F1B'", "Did you mean '1f1b'?"]),
        ({"partitioner": "layer1"}, ["partitioner='layer1'", "a list of module names"]),
        ({"partitioner": "hierarchical"}, ["partitioner='hierarchical'", "'prefix_sum'", "'antichain'"]),
        ({"partitioner": []}, ["partitioner=()", "a list of module names"]),
        ({"partitioner": [3]}, ["partitioner=(3,)", "a list of module names"]),
        ({"loss_reduction": "avg"}, ["loss_reduction='avg'", "'valid_tokens'", "(target)"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm=-1.0", "a number above 0"]),
        ({"max_grad_norm": float("nan")}, ["max_grad_norm=nan"]),
        ({"link_checksum": True}, ["link_checksum=True", "'auto', 'on', 'off'"]),
        ({"link_ports": 5000}, ["link_ports=5000", "'auto' or a pair of ports from 1024 to 65535"]),
        ({"link_ports": [5000]}, ["link_ports=(5000,)"]),
        ({"link_ports": [1023, 5000]}, ["link_ports=(1023, 5000)"]),
        ({"link_ports": [5000, 65536]}, ["link_ports=(5000, 65536)"]),
        ({"link_ports": [5001, 5000]}, ["link_ports=(5001, 5000)", "lower one first"]),
        ({"link_ports": [5000, True]}, ["link_ports=(5000, True)"]),
        ({"stale_correction": "predicts"}, ["stale_correction='predicts'", "Did you mean 'predict'?"]),
        ({"discount_updates": 0}, ["discount_updates=0", "at least 1"]),
        ({"seed": -1}, ["seed=-1", "at least 0"]),
        ({"seed": 2**63}, ["seed=9223372036854775808", "at most 2**62"]),  # no manifest would be read that has it
        ({"retune_interval_steps": -1}, ["retune_interval_steps=-1", "at least 0"]),
        ({"slack": [2, 0], "schedule": "slack"}, ["slack=(2, 0)", "one per hop"]),
        ({"schedule": "rows.csv"}, ["schedule='rows.csv'", "'1f1b'"]),
        ({"transport": "ray_collective"}, ["transport='ray_collective'", "Did you mean 'collective'?"]),
        ({"retune_microbatches": 1}, ["retune_microbatches=1", "True or False"]),
    ],
)
def test_impossible_values(values: dict[str, object], words: list[str]) -> None:
    message = refusal(**values)
    assert "is not possible" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"minibatch_size": 2, "num_microbatches": 4}, ["num_microbatches=4", "minibatch_size=2"]),
        ({"minibatch_size": 9, "num_microbatches": 6}, ["num_microbatches=5", "minibatch_size=12"]),
        ({"partitioner": ["b"], "num_stages": 3}, ["num_stages=3", "2 stages"]),
        ({"partitioner": ["b", "b"]}, ["'b' twice"]),
        ({"num_replicas": [1, 1], "num_stages": 3}, ["num_replicas=(1, 1)", "num_stages=3"]),
        ({"num_replicas": 2}, ["num_replicas=2", "num_stages='auto'", "num_stages=2"]),
        (
            {"num_replicas": [2, 1], "num_stages": 2, "schedule": "zb-v"},
            ["num_replicas=(2, 1)", "schedule='zb-v'", "num_replicas=2", "'1f1b'"],
        ),
        ({"update_interval": "per_replica", "schedule": "pipedream"}, ["'per_replica'", "num_replicas=1", "[2, 1]"]),
        ({"update_interval": "per_replica"}, ["'per_replica'", "schedule='auto'", "schedule='pipedream'"]),
        (
            {"update_interval": "per_replica", "schedule": "pipedream", "num_replicas": 2, "num_stages": 2}
            | {"vertical_sync": True},
            ["'per_replica'", "vertical_sync=True", "Leave vertical_sync out"],
        ),
        (
            {"update_interval": "per_replica", "schedule": "pipedream", "num_replicas": 2, "num_stages": 2}
            | {"loss_reduction": "valid_tokens"},
            ["'per_replica'", "loss_reduction='valid_tokens'", "'mean' or 'sum'"],
        ),
        ({"stale_correction": "predict"}, ["stale_correction='predict'", "schedule='auto'", "never stale", "'2bw'"]),
        (
            {"stale_correction": "discount", "schedule": "zb-h1"},
            ["stale_correction='discount'", "schedule='zb-h1'", "never stale"],
        ),
        (
            {"stale_correction": "discount", "schedule": "2bw"},
            ["stale_correction='discount'", "schedule='2bw'", "one update late", "'predict'"],
        ),
        (
            {"discount_updates": 10, "schedule": "pipedream", "stale_correction": "predict"},
            ["discount_updates=10", "stale_correction='predict'", "'discount'"],
        ),
        ({"replicated_buffers": True}, ["replicated_buffers=True", "num_replicas=1", "[2, 1]"]),
        ({"num_replicas": "auto", "schedule": "2bw"}, ["num_replicas='auto'", "schedule='2bw'", "Set a number"]),
        (
            {"num_replicas": [3, 1], "num_stages": 2, "schedule": "2bw", "num_microbatches": 8},
            ["num_microbatches=8", "schedule='2bw'", "3 lanes", "num_microbatches=9"],
        ),
        (
            {"num_replicas": 2, "num_stages": 2, "schedule": "pipedream", "update_interval": 3},
            ["update_interval=3", "2 lanes", "update_interval=4"],
        ),
        (
            {"num_replicas": [3, 1], "num_stages": 2, "schedule": "pipedream", "num_lanes": 4},
            ["num_lanes=4", "num_replicas=(3, 1)", "multiple of 3"],
        ),
        (
            {"num_replicas": [3, 1], "num_stages": 2, "num_lanes": 2},
            ["num_lanes=2", "num_replicas=(3, 1)", "3 or more"],
        ),
        (
            {"num_replicas": [4, 1], "num_stages": 2, "num_microbatches": 2},
            ["num_microbatches=2", "num_replicas=(4, 1)", "4 or more"],
        ),
        ({"codec_sums": "bf16"}, ["codec_sums='bf16'", "num_replicas=1", "Set num_replicas"]),
        ({"shard_optimizer": True}, ["shard_optimizer=True", "num_replicas=1", "[2, 1]", "leave shard_optimizer out"]),
        ({"shard_optimizer": True, "num_lanes": 2}, ["shard_optimizer=True", "num_replicas=1", "[2, 1]"]),
        (
            {"shard_optimizer": True, "num_replicas": 2, "num_stages": 2, "schedule": "pipedream"},
            ["shard_optimizer=True", "schedule='pipedream'", "'1f1b'", "leave shard_optimizer out"],
        ),
        ({"num_replicas": "auto", "partitioner": "parameters"}, ["num_replicas='auto'", "'parameters'", "'auto'"]),
        ({"num_replicas": "auto", "schedule": "zb-v"}, ["num_replicas='auto'", "schedule='zb-v'", "num_replicas=2"]),
        (
            {"num_replicas": 2, "num_stages": 2, "schedule": "2bw", "codec_forward": "auto"},
            ["codec_forward='auto'", "schedule='2bw'"],
        ),
        ({"link_ports": [5000, 5009], "transport": "object_store"}, ["link_ports=(5000, 5009)", "'object_store'"]),
        ({"group_size": 2, "schedule": "1f1b"}, ["group_size=2", "'1f1b'"]),
        ({"group_size": 2}, ["group_size=2", "'auto'"]),
        ({"slack": 2, "schedule": "kfkb"}, ["slack=2", "'kfkb'"]),
        ({"slack": [2, 1], "schedule": "slack", "num_stages": 2}, ["slack=(2, 1)", "2 hops", "num_stages=2 has 1"]),
        ({"slack": [2, 1], "schedule": "slack"}, ["slack=(2, 1)", "num_stages='auto' leaves open", "num_stages=3 too"]),
        ({"weight_versions": 2}, ["weight_versions=2", "'auto'", "one weight version"]),
        ({"weight_versions": 3, "schedule": "2bw"}, ["weight_versions=3", "'2bw'", "two weight versions"]),
        ({"update_interval": 4, "schedule": "2bw"}, ["update_interval=4", "once per mini-batch"]),
        ({"vertical_sync": True, "schedule": "1f1b"}, ["vertical_sync=True", "'1f1b'"]),
        ({"group_size": 5, "num_microbatches": 4, "schedule": "kfkb"}, ["group_size=5", "num_microbatches=4"]),
        ({"retune_microbatches": True, "schedule": "2bw"}, ["retune_microbatches=True", "schedule='2bw'"]),
        ({"retune_microbatches": True, "retune_interval_steps": 0}, ["retune_interval_steps=0", "nothing is changed"]),
        ({"retune_microbatches": True, "schedule": "zb-v"}, ["retune_microbatches=True", "schedule='zb-v'"]),
        ({"codec_forward": "auto", "schedule": "interleaved"}, ["codec_forward='auto'", "codec_forward='bf16'"]),
        (
            {"codec_forward": "auto", "retune_interval_steps": 0},
            ["codec_forward='auto' has no effect with retune_interval_steps=0", "leave codec_forward out"],
        ),
        ({"vertical_sync": False, "schedule": "2bw"}, ["vertical_sync=False has no effect with schedule='2bw'"]),
        ({"codec_backward": "auto", "schedule": "zb-v"}, ["codec_backward='auto'", "schedule='zb-v'", "'none'"]),
        ({"num_stages": 3, "schedule": "zb-v"}, ["num_stages=3", "two on every worker", "Make them 4", "interleaved"]),
        ({"partitioner": ["b", "c"], "schedule": "zb-v"}, ["partitioner=('b', 'c')", "3 stages", "Make them 4"]),
    ],
)
def test_fields_at_odds(values: dict[str, object], words: list[str]) -> None:
    message = refusal(**values)
    for word in words:
        assert word in message


def test_every_accepted_pair_gives_that_many_microbatches() -> None:
    for samples in range(1, 25):
        for count in range(1, samples + 1):
            size = -(-samples // count)
            if -(-samples // size) == count:
                PipelineConfig(minibatch_size=samples, num_microbatches=count)
            else:
                assert "does not divide" in refusal(minibatch_size=samples, num_microbatches=count)


def test_configs_are_values() -> None:
    config = PipelineConfig(num_stages=np.int64(3), partitioner=["a", "b"], max_grad_norm=np.float32(1))
    assert type(config.num_stages) is int
    assert config.partitioner == ("a", "b")
    assert config == PipelineConfig(num_stages=3, partitioner=("a", "b"), max_grad_norm=1.0)
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    assert dataclasses.replace(config, seed=7).seed == 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(ConfigError, match="seed=-2"):
        dataclasses.replace(config, seed=-2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"recompute": [True, False, True], "num_stages": 2},
            "recompute=(True, False, True) has 3 items, but num_stages=2. Give one item per stage, or a single "
            "value for all; a list needs num_stages=3 beside it.",
        ),
        (
            {"recompute": [0]},
            "recompute=(0,) names stages by number, but num_stages='auto' leaves open how many there are. Set "
            "num_stages too, or recompute='always'.",
        ),
        (
            {"recompute": [0, 2], "num_stages": 2},
            "recompute=(0, 2) names stage 2, but there are 2, from 0 on. Name each stage once.",
        ),
        (
            {"recompute": [1, 1], "partitioner": ["a"]},
            "recompute=(1, 1) names stage 1 twice. Name each stage once.",
        ),
    ],
)
def test_stages_that_compute_again_are_named_as_they_are(fields: dict[str, object], message: str) -> None:
    assert refusal(**fields) == message
