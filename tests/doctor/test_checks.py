"""Facts in, findings out: each fault is named with its node and its cure, and nothing else is complained about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raypipe.doctor.checks import Facts, Finding, NodeFacts, Requirements, examine

HERE = {"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0", "raypipe": "0.1.0"}
GOOD = NodeFacts(
    "10.0.0.1", host="one", node_id="1", versions=HERE, cpus=4, ray_cpus=4, object_store_bytes=1 << 30,
    shm_bytes=2 << 30, shm_free_bytes=2 << 30, port=20000,
)  # fmt: skip
CLUSTER = Facts(
    "10.0.0.1:6379", (GOOD, replace(GOOD, address="10.0.0.2", host="two", node_id="2")), HERE, auth_mode="token",
    token="~/.ray/auth_token",
)  # fmt: skip
WISHES = Requirements(ports=(20000, 20010), storage="runs", num_workers=4, resources={"CPU": 1})

FOUR_GPUS = {"gpus": 4, "cuda_build": "13.0", "cuda_gpus": 4, "ray_gpus": 4.0, "cupy": ("cupy-cuda13x",)}
ON_GPUS = replace(WISHES, resources={"CPU": 1, "GPU": 1})


def wrong(facts: Facts, needs: Requirements = WISHES) -> list[Finding]:
    """Findings that are not ok; every one has a cure, every ok one has none."""
    findings = examine(facts, needs)
    for finding in findings:
        assert (finding.level == "ok") == (finding.cure == ""), finding
        assert "\n" not in finding.text + finding.cure
    return [finding for finding in findings if finding.level != "ok"]


def second(**values: Any) -> Facts:
    """The cluster with another second node."""
    return replace(CLUSTER, nodes=(CLUSTER.nodes[0], replace(CLUSTER.nodes[1], **values)))


def test_a_good_cluster_and_a_good_machine_have_no_complaint() -> None:
    assert wrong(CLUSTER) == []
    alone = replace(GOOD, address="this machine", ray_cpus=0.0, object_store_bytes=0)
    assert wrong(Facts("", (alone,), HERE)) == []
    assert [finding.subject for finding in examine(CLUSTER, WISHES)] == [
        "cluster", "token", "versions", "ports", "gpus", "shm", "storage", "cpus", "speed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "level", "subject", "words", "cure"),
    [
        ({"versions": {**HERE, "torch": "2.12.0"}}, "problem", "versions", ["10.0.0.2 (two)", "torch 2.12.0"], "2.13"),
        ({"versions": {**HERE, "raypipe": ""}}, "problem", "versions", ["10.0.0.2", "no raypipe"], "raypipe 0.1.0"),
        ({"versions": {**HERE, "python": "3.12.1"}}, "problem", "versions", ["python 3.12.1"], "3.11.7"),
        ({"versions": {**HERE, "python": "3.11.9"}}, "warning", "versions", ["python 3.11.9"], "3.11.7"),
        ({"versions": {**HERE, "torch": "2.13.0+cu130"}}, "warning", "versions", ["+cu130"], "2.13.0+cpu"),
        ({"versions": {**HERE, "raypipe": "0.1.0.dev7+g1"}}, "warning", "versions", [".dev7"], "raypipe 0.1.0"),
        ({"port": 0, "port_error": "Address in use"}, "problem", "ports", ["20000-20010", "in use"], "another range"),
        ({"unreachable": {"10.0.0.1:20000": "timed out"}}, "problem", "ports", ["10.0.0.1:20000"], "firewalls"),
        ({"gpus": 2, "visible": ""}, "problem", "gpus", ["hidden GPU", "has 2", "sees 0"], "unset CUDA_VISIBLE_DEVIC"),
        ({"gpus": 2}, "problem", "gpus", ["hidden GPU"], "without CUDA"),
        ({"gpus": 2, "cuda_build": "13.0"}, "problem", "gpus", ["hidden GPU", "libcuda.so.1 is not"], "--gpus all"),
        (
            {"gpus": 2, "cuda_build": "13.0", "cuda_driver": "12.4"},
            "problem", "gpus", ["hidden GPU", "built for CUDA 13.0", "runs CUDA 12.4"],
            "update the driver to 580.65.06 or newer, or install a torch for CUDA 12",
        ),
        (
            {"gpus": 2, "cuda_build": "12.8", "cuda_driver": "13.2", "cuda_gpus": 1, "ray_gpus": 1.0},
            "warning", "gpus", ["has 2, torch sees 1", "runs CUDA 13.2"], "nvidia-smi",
        ),
        (
            {"gpus": 2, "cuda_build": "13.0", "cuda_gpus": 2, "ray_gpus": 2.0, "cupy": ["cupy-cuda12x"]},
            "warning", "gpus", ["10.0.0.2", "cupy-cuda12x beside a torch for CUDA 13.0", "codecs fail"],
            "pip uninstall cupy-cuda12x`, then `pip install 'raypipe[cuda13]'",
        ),
        (
            {"gpus": 1, "cuda_build": "13.0", "cuda_gpus": 1, "ray_gpus": 1.0, "cupy": ["cupy-cuda13x"]},
            "ok", "", [], "",
        ),
        ({"gpus": 1, "cuda_build": "13.0", "cuda_gpus": 1, "ray_gpus": 1.0, "cupy": ["cupy"]}, "ok", "", [], ""),
        (
            {"gpus": 2, "cuda_build": "13.0", "cuda_gpus": 1, "visible": "0", "ray_gpus": 1.0},
            "warning", "gpus", ["hidden GPU", "CUDA_VISIBLE_DEVICES='0'"], "name all GPUs",
        ),
        ({"gpus": 2, "cuda_build": "13.0", "cuda_gpus": 2}, "problem", "gpus", ["Ray hands out 0"], "--num-gpus=2"),
        ({"shm_bytes": 64 << 20}, "problem", "shm", ["10.0.0.2 (two)", "64.0 MiB"], "--shm-size"),
        ({"object_store_bytes": 3 << 30}, "warning", "shm", ["2.0 GiB", "3.0 GiB", "disk"], "--object-store-memory"),
        ({"storage_error": "Read-only file system: runs"}, "problem", "storage", ["Read-only"], "storage_path"),
        ({"storage_shared": False}, "problem", "storage", ["another folder", "10.0.0.2"], "s3://"),
        ({"ray_cpus": 0.0}, "ok", "", [], ""),
        ({"error": "no answer within 60 s", "ray_cpus": 4}, "problem", "node", ["10.0.0.2", "no answer"], "log"),
    ],
)  # fmt: skip
def test_a_fault_of_one_node_is_named_alone(
    values: dict[str, Any], level: str, subject: str, words: list[str], cure: str
) -> None:
    findings = wrong(second(**values))
    if level == "ok":
        assert findings == []
        return
    assert [(finding.level, finding.subject) for finding in findings] == [(level, subject)]
    for word in words:
        assert word in findings[0].text
    assert cure in findings[0].cure


@pytest.mark.parametrize(
    ("facts", "needs", "level", "subject", "words"),
    [
        (replace(CLUSTER, auth_mode="disabled"), WISHES, "warning", "token", ["10.0.0.1", "can run code"]),
        (replace(CLUSTER, error="InvalidAuthToken", kind="authentication"), WISHES, "problem", "token", ["not the"]),
        (
            replace(CLUSTER, error="no token was found", kind="authentication", token=""),
            WISHES, "problem", "token", ["gives no token"],
        ),
        (replace(CLUSTER, error="refused", kind="ConnectionError"), WISHES, "problem", "cluster", ["refused"]),
        (Facts("", (GOOD,), HERE, auth_mode="token"), WISHES, "problem", "token", ["there is no token"]),
        (CLUSTER, replace(WISHES, num_workers=9), "problem", "cpus", ["9 workers want 9 CPUs", "8", "for ever"]),
        (Facts("", (GOOD,), HERE), replace(WISHES, num_workers=9), "warning", "cpus", ["share 4"]),
        (CLUSTER, replace(WISHES, resources={"CPU": 1, "GPU": 1}), "problem", "gpus", ["wants 4 GPUs, there are 0"]),
        (
            second(ray_gpus=4.0), replace(WISHES, resources={"CPU": 1, "GPU": 1}),
            "problem", "gpus", ["10.0.0.2", "Ray hands out 4 GPUs, torch sees 0"],
        ),
        (
            second(**{**FOUR_GPUS, "cupy": ()}), replace(ON_GPUS, codecs=True),
            "warning", "gpus", ["10.0.0.2", "has no CuPy, so that its processor encodes"],
        ),
        (
            second(**FOUR_GPUS, nccl="2.18.5"), replace(ON_GPUS, transport="collective"),
            "problem", "gpus", ["10.0.0.2", "NCCL 2.18.5, whose links cannot be given up"],
        ),
        (
            second(**FOUR_GPUS), replace(ON_GPUS, transport="collective"),
            "problem", "gpus", ["10.0.0.2", "torch has no NCCL"],
        ),
    ],
)  # fmt: skip
def test_a_fault_of_the_whole_is_named_alone(
    facts: Facts, needs: Requirements, level: str, subject: str, words: list[str]
) -> None:
    findings = wrong(facts, needs)
    assert [(finding.level, finding.subject) for finding in findings] == [(level, subject)]
    for word in words:
        assert word in findings[0].text


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_a_cluster_on_loopback_needs_no_token(address: str) -> None:
    assert wrong(Facts(f"{address}:6379", (replace(GOOD, address=address),), HERE)) == []
