"""Checks of a machine and a cluster: facts in (doctor/collect.py), findings out, each with its fix."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from raypipe.ir.units import human_bytes

LEAST_SHM_BYTES = 256 << 20
"""Minimum size of /dev/shm. Containers get 64 MiB by default, too little even for the weights of a small model."""


class Finding(NamedTuple):
    """One line of the report: level, subject such as "ports", what was found, and the fix ("" if nothing is wrong)."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject:<9} {self.text}"
        return f"{line}\n{'':18} cure: {self.cure}" if self.cure else line


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one machine. Sizes are in bytes.

    Attributes:
        address: address of the node, or "this machine".
        error: reason why the node did not answer, so that the other facts are unknown; "" if it did.
        versions: versions of python, torch, ray and raypipe; "" for a package that cannot be imported.
        ray_cpus, ray_gpus: CPUs and GPUs that Ray assigns there.
        object_store_bytes: size of Ray's object store; 0 without Ray.
        gpus: number of GPU device files.
        cuda_gpus: number of GPUs that torch sees.
        visible: CUDA_VISIBLE_DEVICES of the process that started Ray; None if not set.
        cuda_build: CUDA version for which torch was built; "" without CUDA.
        cuda_driver: newest CUDA version that the driver runs; "" if its library is not found.
        cupy: names of the packages of CuPy that are installed, "cupy-cuda13x" for CUDA 13.
        port: port on which the node could listen; 0 if it could listen on none.
        port_error: reason why the node could listen on no port; "" if it could.
        unreachable: {"address:port" of a listener to which the node could not connect: reason}.
        storage_error: reason why the storage folder cannot be written; "" if it can.
        storage_shared: True if the storage folder is the same as that of this process.
    """

    address: str
    error: str = ""
    node_id: str = ""
    host: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 1
    ray_cpus: float = 0.0
    ray_gpus: float = 0.0
    object_store_bytes: int = 0
    shm_bytes: int = 1 << 40
    shm_free_bytes: int = 1 << 40
    gpus: int = 0
    visible: str | None = None
    cuda_build: str = ""
    cuda_gpus: int = 0
    cuda_driver: str = ""
    cupy: Sequence[str] = ()
    nccl: str = ""
    port: int = 1
    port_error: str = ""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    storage_error: str = ""
    storage_shared: bool = True


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of a run on a cluster.

    Attributes:
        ports: (lowest, highest) port for links; None for any.
        storage: storage_path.
        num_workers: number of workers, the minimum if the run is elastic; 0 if unknown.
        resources: resources of one worker.
        codecs: True if a codec may be used.
    """

    ports: tuple[int, int] | None = None
    storage: str = ""
    num_workers: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    transport: str = "auto"
    codecs: bool = False

    @property
    def gpus(self) -> float:
        """Number of GPUs that all workers need together."""
        return self.num_workers * self.resources.get("GPU", 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of the whole cluster.

    Attributes:
        address: address of the cluster; "" if only this machine was examined.
        nodes: facts of every node.
        here: versions of python, torch, ray and raypipe in this process.
        error: Ray's message if the connection failed; else "".
        kind: kind of that failure: "authentication", "silence", or the name of an exception.
        auth_mode: effective RAY_AUTH_MODE, "token" or "disabled".
        token: place of this machine's token; "" without a token.
    """

    address: str
    nodes: tuple[NodeFacts, ...]
    here: Mapping[str, str]
    error: str = ""
    kind: str = ""
    auth_mode: str = "disabled"
    token: str = ""


SPEED = "1.0 in the file of `raypipe plan --cluster` is the machine that times the model"


def examine(facts: Facts, needs: Requirements) -> list[Finding]:
    """Run all checks: cluster and token first, then nodes, versions, ports, GPUs, memory, storage, CPUs."""
    findings = list(_connection(facts))
    answered = [node for node in facts.nodes if not node.error]
    for node in facts.nodes:
        if node.error:
            cure = "look at the node's own log under /tmp/ray/session_latest/logs, and restart its Ray"
            findings.append(Finding("problem", "node", f"{node.address} does not answer: {node.error}", cure))
    for subject, check in _CHECKS.items():
        complaints = [Finding(*complaint) for complaint in check(answered, facts, needs)]
        findings += complaints or [Finding("ok", subject, _all_well(subject, answered, facts, needs))]
    return [*findings, Finding("ok", "speed", SPEED)]


_Complaints = Iterator[tuple[Any, ...]]


def _connection(facts: Facts) -> Iterator[Finding]:
    """Check that the cluster accepts this process, and warn if the cluster accepts processes without a token."""
    if not facts.address:
        text = "no cluster: this machine only (--address or RAY_ADDRESS names one)"
        yield Finding("ok", "cluster", text)
        if facts.auth_mode == "token" and not facts.token:
            yield _no_token("RAY_AUTH_MODE=token, but there is no token on this machine")
        return
    if facts.kind == "authentication" or (facts.error and "token" in facts.error.lower()):
        lacks = "the token of this machine is not the cluster's" if facts.token else "this machine gives no token"
        yield _no_token(f"{facts.address} refuses connections without its token, and {lacks}")
        return
    if facts.error:
        cure = "check the address, that `ray status` works there, and that Ray runs on this machine as a part of it"
        yield Finding("problem", "cluster", f"{facts.address} cannot be reached: {facts.error}", cure)
        return
    yield Finding("ok", "cluster", f"{facts.address} answers, {len(facts.nodes)} nodes")
    if facts.auth_mode == "token":
        yield Finding("ok", "token", f"the cluster takes the token of {facts.token}")
    elif open_to := [node.address for node in facts.nodes if not _is_loopback(node.address)]:
        text = f"any process that reaches {', '.join(open_to[:3])} can run code there: the cluster needs no token"
        cure = (
            "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, and start Ray everywhere with "
            "RAY_AUTH_MODE=token"
        )
        yield Finding("warning", "token", text, cure)


def _no_token(text: str) -> Finding:
    cure = (
        "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a copy of the head node's ~/.ray/auth_token "
        "(or RAY_AUTH_TOKEN to what is in it)"
    )
    return Finding("problem", "token", text, cure)


def _versions(nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> _Complaints:
    for node in nodes:
        for package, here in facts.here.items():
            there = node.versions.get(package, "")
            if there == here:
                continue
            # A last digit of Python's, torch's +cpu or +cu130 and raypipe's commit may differ: all is read the same.
            same = there and (
                here.split(".")[:2] == there.split(".")[:2]
                if package == "python"
                else re.split(r"\+|\.dev", here)[0] == re.split(r"\+|\.dev", there)[0]
            )
            text = f"node {_name(node)} has {f'{package} {there}' if there else f'no {package}'}, this machine {here}"
            cure = f"install the same everywhere: {package} {here} there, then start its Ray again"
            yield ("warning" if same else "problem", "versions", text, cure)


def _ports(nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> _Complaints:
    low, high = needs.ports or (0, 0)
    which = f"the ports {low}-{high}" if needs.ports else "the ports that the system gives"
    for node in nodes:
        if not node.port:
            text = f"node {_name(node)} can listen on none of {which}: {node.port_error}"
            cure = "end what uses them (`ss -ltnp` on that node), or take another range with --ports"
            yield ("problem", "ports", text, cure)
        for listener, why in node.unreachable.items():
            text = f"node {_name(node)} cannot connect to {listener}: {why}"
            cure = f"let TCP to {which} of {listener.rpartition(':')[0]} through, in firewalls and security groups"
            yield ("problem", "ports", text, cure)


def _gpus(nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> _Complaints:
    for node in nodes:
        if node.cuda_gpus < node.gpus:
            text = f"hidden GPU: node {_name(node)} has {node.gpus}, torch sees {node.cuda_gpus} of them"
            if node.visible is not None:
                text += f" (CUDA_VISIBLE_DEVICES={node.visible!r})"
                cure = "unset CUDA_VISIBLE_DEVICES where Ray or the run is started, or name all GPUs in it"
            elif not node.cuda_build:
                cure = "that torch is built without CUDA: install a CUDA build (https://pytorch.org/get-started)"
            else:
                text += f": {_driver(node)[0]}"
                cure = _driver(node)[1]
            # Hiding some GPUs may be intended, hiding all is not.
            yield ("warning" if node.cuda_gpus else "problem", "gpus", text, cure)
        elif facts.address and node.ray_gpus < node.cuda_gpus:
            text = f"hidden GPU: node {_name(node)} has {node.cuda_gpus}, Ray hands out {node.ray_gpus:g}"
            cure = f"start Ray there with --num-gpus={node.cuda_gpus}, or without --num-gpus"
            yield ("warning" if node.ray_gpus else "problem", "gpus", text, cure)
        elif facts.address and needs.gpus and node.ray_gpus > node.cuda_gpus:
            text = f"node {_name(node)}: Ray hands out {node.ray_gpus:g} GPUs, torch sees {node.cuda_gpus}, so workers "
            text += "that are given the others fail"
            yield ("problem", "gpus", text, f"start Ray there with --num-gpus={node.cuda_gpus}, or without --num-gpus")
        if node.gpus and node.cuda_build:
            yield from _cupy(node, needed=bool(needs.gpus) and needs.codecs)
            if needs.gpus and needs.transport == "collective":
                yield from _nccl(node)
    num_gpus = needs.gpus
    there = sum(node.ray_gpus if facts.address else node.cuda_gpus for node in nodes)
    if num_gpus > there:
        text = f"the run wants {num_gpus:g} GPUs, there are {there:g}"
        yield ("problem", "gpus", text, "take fewer num_workers, set use_gpu: false, or add nodes")


LEAST_DRIVER = {"12": "525.60.13", "13": "580.65.06"}
"""Oldest driver by major version of CUDA; it runs all minor versions (NVIDIA's table of CUDA compatibility)."""


def _driver(node: NodeFacts) -> tuple[str, str]:
    """Return (reason, fix) for a machine whose torch is built for CUDA and finds too few GPUs.

    The caller has checked that CUDA_VISIBLE_DEVICES is not set.
    """
    build, driver = node.cuda_build.partition(".")[0], node.cuda_driver.partition(".")[0]
    if not driver:
        text = f"torch is built for CUDA {node.cuda_build}, and the driver's library libcuda.so.1 is not found"
        return text, "install NVIDIA's driver; in a container, start that with all GPUs (`docker run --gpus all`)"
    if int(driver) < int(build):
        text = f"torch is built for CUDA {node.cuda_build}, its driver is older and runs CUDA {node.cuda_driver}"
        least = LEAST_DRIVER.get(build)
        update = f"update the driver to {least} or newer" if least else "update the driver"
        return text, f"{update}, or install a torch for CUDA {driver} (https://pytorch.org/get-started)"
    text = f"its driver runs CUDA {node.cuda_driver}, which torch's {node.cuda_build} fits"
    return text, "look in `nvidia-smi` and `dmesg` for GPUs that have failed, are in MIG mode or belong to others"


LEAST_NCCL = (2, 19, 1)
"""Oldest NCCL whose links can be aborted from another thread while they connect or wait."""


def _nccl(node: NodeFacts) -> _Complaints:
    """Check that torch has an NCCL whose links can be aborted."""
    if not node.nccl:
        text = f"node {_name(node)}: torch has no NCCL, which transport='collective' takes between GPUs"
        yield ("problem", "gpus", text, "install a torch for CUDA on Linux, or take transport='tcp'")
    elif tuple(map(int, node.nccl.split(".")[:3])) < LEAST_NCCL:
        least = ".".join(map(str, LEAST_NCCL))
        text = f"node {_name(node)}: torch has NCCL {node.nccl}, whose links cannot be given up when a worker dies"
        yield ("problem", "gpus", text, f"install a torch with NCCL {least} or newer, or take transport='tcp'")


def _cupy(node: NodeFacts, *, needed: bool) -> _Complaints:
    """Check the installed CuPy packages, which run the codecs' kernels on GPUs.

    Yields a warning if a package for another CUDA major version than that of torch is installed, or if CuPy is
    ``needed`` and missing. The package "cupy", which is built on the machine itself, fits every version.
    """
    fits = f"cupy-cuda{node.cuda_build.partition('.')[0]}x"
    extra = fits.removeprefix("cupy-").removesuffix("x")
    others = [name for name in node.cupy if name not in (fits, "cupy")]  # "cupy" is built for what is there
    if others:
        text = f"node {_name(node)} has {' and '.join(node.cupy)} beside a torch for CUDA {node.cuda_build}"
        text += ": codecs fail on its GPUs"
        yield ("warning", "gpus", text, f"`pip uninstall {' '.join(others)}`, then `pip install 'raypipe[{extra}]'`")
    elif needed and not node.cupy:
        text = f"node {_name(node)} has no CuPy, so that its processor encodes and decodes what stages send"
        yield ("warning", "gpus", text, f"`pip install 'raypipe[{extra}]'`")


def _shared_memory(nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> _Complaints:
    for node in nodes:
        size = human_bytes(node.shm_bytes)
        cure = "give it more: `docker run --shm-size=8g`, or `mount -o remount,size=8G /dev/shm`, then restart Ray"
        if node.shm_bytes < LEAST_SHM_BYTES:
            text = f"/dev/shm of node {_name(node)} has {size}, too little for Ray's object store"
            yield ("problem", "shm", f"{text} (at least {human_bytes(LEAST_SHM_BYTES)})", cure)
        elif node.object_store_bytes > node.shm_bytes:
            store = human_bytes(node.object_store_bytes)
            text = f"/dev/shm of node {_name(node)} has {size}, Ray's object store {store}: it lies on the disk"
            yield ("warning", "shm", text, f"{cure}; or start Ray with a smaller --object-store-memory")


def _storage(nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> _Complaints:
    for node in nodes:
        if node.storage_error:
            text = f"node {_name(node)} cannot write to {needs.storage}: {node.storage_error}"
            yield ("problem", "storage", text, "change its rights, or give another run_config.storage_path")
        elif not node.storage_shared:
            text = f"{needs.storage} of node {_name(node)} is another folder than here: checkpoints would be in pieces"
            yield ("problem", "storage", text, "mount one folder on all nodes, or take s3:// or gs:// as storage_path")


def _cpus(nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> _Complaints:
    num_cpus = needs.num_workers * needs.resources.get("CPU", 1)
    if facts.address and not facts.error:
        there = sum(node.ray_cpus for node in nodes)
        if num_cpus > there:
            text = f"{needs.num_workers} workers want {num_cpus:g} CPUs, Ray has {there:g}: some would wait for ever"
            yield ("problem", "cpus", text, "take fewer num_workers, less CPU in resources_per_worker, or add nodes")
    elif num_cpus > (there := sum(node.cpus for node in nodes)):
        text = f"{needs.num_workers} workers want {num_cpus:g} CPUs and share {there}: it works, slowly"
        yield ("warning", "cpus", text, "take fewer num_workers")


_CHECKS: Mapping[str, Callable[[list[NodeFacts], Facts, Requirements], _Complaints]] = {
    "versions": _versions,
    "ports": _ports,
    "gpus": _gpus,
    "shm": _shared_memory,
    "storage": _storage,
    "cpus": _cpus,
}


def _all_well(subject: str, nodes: list[NodeFacts], facts: Facts, needs: Requirements) -> str:
    """Describe a subject, such as "ports", in one line, if no check found a problem with it."""
    if not nodes:
        return "not known: no node answered"
    ray_gives = bool(facts.address) and not facts.error
    cpus = sum(node.ray_cpus if ray_gives else node.cpus for node in nodes)
    return {
        "versions": ", ".join(f"{package} {there}" for package, there in facts.here.items()),
        "ports": f"{needs.ports[0]}-{needs.ports[1]} are open" if needs.ports else "open, of those the system gives",
        "gpus": f"{sum(node.cuda_gpus for node in nodes)}",
        "shm": f"/dev/shm has at least {human_bytes(min(node.shm_bytes for node in nodes))}",
        "storage": f"{needs.storage} can be written to" if "://" not in needs.storage else "a URI, not tried",
        "cpus": f"{cpus:g}",
    }[subject]


def _name(node: NodeFacts) -> str:
    return f"{node.address} ({node.host})" if node.host and node.host != node.address else node.address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
