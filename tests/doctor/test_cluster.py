"""``raypipe doctor`` against set-ups that are really broken: it names the fault, the node and the cure, and exits 1.

| fault           | how it is made                                                            |
|-----------------|---------------------------------------------------------------------------|
| version skew    | the second node's PYTHONPATH has another torch and another raypipe          |
| missing token   | the head asks for a token, the one who asks has none, or another            |
| closed port     | a routing rule drops what the head's ports answer; or all ports are taken   |
| hidden GPU      | a stand-in for the device files, and CUDA_VISIBLE_DEVICES=""                |
| small /dev/shm  | the second node has a tmpfs of 64 MiB mounted there, in its own namespace   |
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.network import network
from tests.runtime.raylets import TOKEN, Home, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

LOW, HIGH = 25600, 25603
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for namespaces")


def doctor(*arguments: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return cli("doctor", *arguments, before=before, **environment)


def cli(*arguments: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """The command's whole life in the least environment that it can have.

    Its working directory is not the repository's, because Ray lets all workers import from there.
    """
    given = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ} | environment
    return subprocess.run(
        [*before, sys.executable, "-m", "raypipe.cli", *arguments],
        capture_output=True, text=True, timeout=200, env=given, check=False, cwd="/tmp",
    )  # fmt: skip


def findings(run: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Level, text and cure by subject, joined where a subject has several."""
    assert "Traceback" not in run.stderr, run.stderr
    found: dict[str, str] = {}
    for match in re.finditer(r"^(ok|warning|problem) +(\w+) +(.*(?:\n {18} cure: .*)?)", run.stdout, re.MULTILINE):
        found[match[2]] = f"{found.get(match[2], '')}{match[1]} {match[3]}\n"
    assert found, run
    return found


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, tuple[str, ...]]]:
    """A head that asks for a token, in a namespace; a second node with other versions and little shared memory."""
    stub = tmp_path_factory.mktemp("stub")
    for package, version in (("torch", "2.12.0"), ("raypipe", "0.0.9")):
        (stub / package).mkdir()
        (stub / package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    with network() as lab, private_cluster(lab.addresses[0]) as home:
        home.start(*lab.prefix(0), **TOKEN)
        home.start(*lab.prefix(1), at=lab.addresses[1], shm_bytes=64 << 20, PYTHONPATH=str(stub), **TOKEN)
        # What the head's ports answer is dropped on the way, as a firewall would do it.
        rule = ["rule", "add", "ipproto", "tcp", "sport", f"{LOW}-{HIGH}", "blackhole"]
        subprocess.run(["ip", "-n", lab.names[0], *rule], check=True, timeout=60)
        yield home, lab.prefix(0)


@needs_root
@pytest.mark.net
def test_version_skew_closed_port_and_small_shm(broken: tuple[Home, tuple[str, ...]]) -> None:
    home, inside = broken
    run = doctor("--address", home.address, "--ports", f"{LOW}-{HIGH}", before=inside, **TOKEN, HOME="/nowhere")
    found = findings(run)
    assert run.returncode == 1
    other = home.head.removesuffix("1") + "2"
    assert found["cluster"].startswith("ok")
    assert "takes the token of RAY_AUTH_TOKEN" in found["token"]
    for package in ("torch 2.12.0", "raypipe 0.0.9"):
        assert re.search(rf"problem node {other} .*has {package}, this machine .*\n +cure: install", found["versions"])
    assert re.search(rf"problem node {other} .*cannot connect to {home.head}:{LOW}: timed out", found["ports"])
    assert f"cure: let TCP to the ports {LOW}-{HIGH} of {home.head} through" in found["ports"]
    assert found["ports"].count("problem") == 1  # the other way it is open
    assert re.search(rf"problem /dev/shm of node {other} .*has 64.0 MiB", found["shm"])
    assert "--shm-size" in found["shm"]
    assert found["shm"].count("problem") == 1


@needs_root
@pytest.mark.net
@pytest.mark.parametrize("environment", [{"RAY_AUTH_MODE": "token"}, TOKEN | {"RAY_AUTH_TOKEN": "f" * 32}])
def test_missing_and_wrong_token(broken: tuple[Home, tuple[str, ...]], environment: dict[str, str]) -> None:
    """``raypipe status`` says it in a line: neither does Ray write into it, nor end the process."""
    home, inside = broken
    run = doctor("--address", home.address, before=inside, HOME="/nowhere", **environment)
    found = findings(run)
    assert run.returncode == 1
    assert found["token"].startswith(f"problem {home.address} refuses connections without its token")
    wrong = "RAY_AUTH_TOKEN" in environment
    assert ("is not the cluster's" if wrong else "gives no token") in found["token"]
    assert "cure: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH" in found["token"]
    run = cli("status", "nowhere", before=inside, HOME="/nowhere", RAY_ADDRESS=home.address, **environment)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("raypipe: There is no run's folder nowhere, neither here nor in ~/ray_results. No Ray clust")
    assert f"at {home.address}: " in line
    assert ("accepts none from here" if wrong else "there is no token on this machine") in line
    assert line.endswith("raypipe doctor looks closer.")


def test_a_cluster_without_a_token_and_a_hidden_gpu(tmp_path: Path) -> None:
    """The raylet's environment counts, because Ray hides all GPUs from a probe that asks for none."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    with private_cluster() as home:
        home.start(RAY_AUTH_MODE="disabled", CUDA_VISIBLE_DEVICES="")
        options = ("--address", home.address, "--devices", str(tmp_path))
        run = doctor(*options, RAY_AUTH_MODE="disabled", HOME=str(tmp_path))
    found = findings(run)
    assert run.returncode == 1
    assert re.search(r"problem hidden GPU: node .* has 1, torch sees 0 .*CUDA_VISIBLE_DEVICES=''", found["gpus"])
    assert "cure: unset CUDA_VISIBLE_DEVICES" in found["gpus"]
    # Ray takes the machine's own address for 127.0.0.1, so others reach this cluster.
    assert re.search(r"warning any process that reaches .*\n +cure: .*RAY_AUTH_MODE=token", found["token"])
    for subject in ("cluster", "versions", "ports", "shm", "storage", "cpus"):
        assert found[subject].startswith("ok"), found[subject]


def test_ports_that_are_taken_and_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "ray_results").touch()  # a file where the folder of all runs belongs
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = doctor("--ports", f"{port}-{port}", HOME=str(tmp_path))
    found = findings(run)
    assert run.returncode == 1
    assert "problem node this machine" in found["ports"]
    assert f"can listen on none of the ports {port}-{port}: Address already in use" in found["ports"]
    assert found["storage"].startswith("problem")


def test_this_machine_alone_is_well(tmp_path: Path) -> None:
    run = doctor(HOME=str(tmp_path))
    assert run.returncode == 0, run.stdout
    assert {text.split()[0] for text in findings(run).values()} == {"ok"}
