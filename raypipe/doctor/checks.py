"""What this machine and cluster can and cannot do: facts in, findings out, each with its cure.

facts (doctor/cluster.py asks every node)  -->  checks: pure functions  -->  ok | warning | problem

problem  versions   node 10.0.0.2 has torch 2.12.0, this machine 2.13.0
         cure: install the same everywhere: pip install torch==2.13.0 there, then start its Ray again
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from raypipe.ir.plan import human_bytes

__all__ = ["Facts", "Finding", "Node", "Wishes", "examine"]

LEAST_SHM_BYTES = 256 << 20
"""Containers get 64 MiB where nobody asks for more, which does not hold one small model's weights."""


class Finding(NamedTuple):
    """One line of the report; ``cure`` is empty where nothing is wrong."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject:<9} {self.text}"
        return f"{line}\n{'':18} cure: {self.cure}" if self.cure else line


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, as it was found. Sizes are in bytes.

    Attributes:
        address: of the node, or "this machine".
        error: why a node did not answer; then the rest is not known.
        versions: of python, torch, ray and raypipe; "" for what cannot be imported.
        ray_cpus, ray_gpus: what Ray hands out there.
        object_store_bytes: of Ray's store; 0 without Ray.
        gpus: device files.
        visible: CUDA_VISIBLE_DEVICES where Ray was started; None if not set.
        cuda_build: CUDA version that torch was built for, "" for none.
        cuda_gpus: GPUs that torch sees.
        cuda_driver: newest CUDA version that the driver runs; "" where its library is not found.
        cupy: names of the packages of CuPy that are installed, "cupy-cuda13x" for CUDA 13.
        nccl: version of torch's NCCL; "" for none.
        port: that it could listen on; 0 for none, with port_error.
        unreachable: address and reason of every listener that it could not connect to.
        storage_error: why the storage folder cannot be written to.
        storage_shared: the storage folder is the same as that of the machine that asked.
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
class Wishes:
    """What a run asks for.

    Attributes:
        ports: lowest and highest port that the nodes may use among each other; None for any.
        storage: storage_path.
        num_workers: places for stages (the fewest of an elastic run); 0 if not known.
        resources: of one worker.
        transport: of its links.
        codecs: it names a codec, or leaves it to the controller to take one.
    """

    ports: tuple[int, int] | None = None
    storage: str = ""
    num_workers: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    transport: str = "auto"
    codecs: bool = False

    @property
    def gpus(self) -> float:
        """That all workers want together."""
        return self.num_workers * self.resources.get("GPU", 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found.

    Attributes:
        address: of the cluster; "" where only this machine was looked at.
        error, kind: why there was no connection, in Ray's words, and what kind of failure that was.
        auth_mode: RAY_AUTH_MODE as it counts here, "token" or "disabled".
        token: where a token was found, "" for nowhere.
        here: versions of the process that asked.
    """

    address: str
    nodes: tuple[Node, ...]
    here: Mapping[str, str]
    error: str = ""
    kind: str = ""
    auth_mode: str = "disabled"
    token: str = ""


SPEED = "1.0 in the file of `raypipe plan --cluster` is the machine that times the model"


def examine(facts: Facts, wishes: Wishes) -> list[Finding]:
    """All findings, in the order in which a person would look."""
    found = list(_connection(facts))
    answered = [node for node in facts.nodes if not node.error]
    for node in facts.nodes:
        if node.error:
            cure = "look at the node's own log under /tmp/ray/session_latest/logs, and restart its Ray"
            found.append(Finding("problem", "node", f"{node.address} does not answer: {node.error}", cure))
    for subject, check in _CHECKS.items():
        complaints = [Finding(*complaint) for complaint in check(answered, facts, wishes)]
        found += complaints or [Finding("ok", subject, _all_well(subject, answered, facts, wishes))]
    return [*found, Finding("ok", "speed", SPEED)]


_Complaints = Iterator[tuple[Any, ...]]


def _connection(facts: Facts) -> Iterator[Finding]:
    """Whether the cluster took us in, and whether it takes in everybody."""
    if not facts.address:
        text = "no cluster asked: this machine only (--address or RAY_ADDRESS names one)"
        yield Finding("ok", "cluster", text)
        if facts.auth_mode == "token" and not facts.token:
            yield _no_token("RAY_AUTH_MODE=token, but there is no token on this machine")
        return
    if facts.kind == "authentication" or (facts.error and "token" in facts.error.lower()):
        lacks = "the token of this machine is not the cluster's" if facts.token else "this machine gives no token"
        yield _no_token(f"{facts.address} lets nobody in without its token, and {lacks}")
        return
    if facts.error:
        cure = "check the address, that `ray status` works there, and that Ray runs on this machine as a part of it"
        yield Finding("problem", "cluster", f"{facts.address} cannot be reached: {facts.error}", cure)
        return
    yield Finding("ok", "cluster", f"{facts.address} answers, {len(facts.nodes)} nodes")
    if facts.auth_mode == "token":
        yield Finding("ok", "token", f"the cluster takes the token of {facts.token}")
    elif open_to := [node.address for node in facts.nodes if not _is_loopback(node.address)]:
        text = f"whoever reaches {', '.join(open_to[:3])} can run anything there: the cluster asks for no token"
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


def _versions(nodes: list[Node], facts: Facts, wishes: Wishes) -> _Complaints:
    for node in nodes:
        for package, here in facts.here.items():
            there = node.versions.get(package, "")
            if there == here:
                continue
            # A last digit of Python's, and torch's +cpu or +cu130, may differ: what is sent is read all the same.
            same = there and (
                here.split(".")[:2] == there.split(".")[:2]
                if package == "python"
                else here.split("+")[0] == there.split("+")[0]
            )
            text = f"node {_name(node)} has {f'{package} {there}' if there else f'no {package}'}, this machine {here}"
            cure = f"install the same everywhere: {package} {here} there, then start its Ray again"
            yield ("warning" if same else "problem", "versions", text, cure)


def _ports(nodes: list[Node], facts: Facts, wishes: Wishes) -> _Complaints:
    low, high = wishes.ports or (0, 0)
    which = f"the ports {low}-{high}" if wishes.ports else "the ports that the system gives"
    for node in nodes:
        if not node.port:
            text = f"node {_name(node)} can listen on none of {which}: {node.port_error}"
            cure = "end what uses them (`ss -ltnp` on that node), or take another range with --ports"
            yield ("problem", "ports", text, cure)
        for listener, why in node.unreachable.items():
            text = f"node {_name(node)} cannot connect to {listener}: {why}"
            cure = f"let TCP to {which} of {listener.rpartition(':')[0]} through, in firewalls and security groups"
            yield ("problem", "ports", text, cure)


def _gpus(nodes: list[Node], facts: Facts, wishes: Wishes) -> _Complaints:
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
            # Somebody who hides some of the GPUs may mean it; nobody means to hide all.
            yield ("warning" if node.cuda_gpus else "problem", "gpus", text, cure)
        elif facts.address and node.ray_gpus < node.cuda_gpus:
            text = f"hidden GPU: node {_name(node)} has {node.cuda_gpus}, Ray hands out {node.ray_gpus:g}"
            cure = f"start Ray there with --num-gpus={node.cuda_gpus}, or without --num-gpus"
            yield ("warning" if node.ray_gpus else "problem", "gpus", text, cure)
        elif facts.address and wishes.gpus and node.ray_gpus > node.cuda_gpus:
            text = f"node {_name(node)}: Ray hands out {node.ray_gpus:g} GPUs, torch sees {node.cuda_gpus}, so workers "
            text += "that are given the others fail"
            yield ("problem", "gpus", text, f"start Ray there with --num-gpus={node.cuda_gpus}, or without --num-gpus")
        if node.gpus and node.cuda_build:
            yield from _cupy(node, wanted=bool(wishes.gpus) and wishes.codecs)
            if wishes.gpus and wishes.transport == "collective":
                yield from _nccl(node)
    wanted = wishes.gpus
    there = sum(node.ray_gpus if facts.address else node.cuda_gpus for node in nodes)
    if wanted > there:
        text = f"the run wants {wanted:g} GPUs, there are {there:g}"
        yield ("problem", "gpus", text, "take fewer num_workers, set use_gpu: false, or add nodes")


LEAST_DRIVER = {"12": "525.60.13", "13": "580.65.06"}
"""By major version of CUDA, of which a driver runs all minor ones (NVIDIA's table of CUDA compatibility)."""


def _driver(node: Node) -> tuple[str, str]:
    """Why torch finds no GPU where it is built with CUDA and nothing hides them, and the cure."""
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
"""From which on a link can be given up from another thread while it is made or waits."""


def _nccl(node: Node) -> _Complaints:
    """Whether links over NCCL can be made, and given up."""
    if not node.nccl:
        text = f"node {_name(node)}: torch has no NCCL, which transport='collective' takes between GPUs"
        yield ("problem", "gpus", text, "install a torch for CUDA on Linux, or take transport='tcp'")
    elif tuple(map(int, node.nccl.split(".")[:3])) < LEAST_NCCL:
        least = ".".join(map(str, LEAST_NCCL))
        text = f"node {_name(node)}: torch has NCCL {node.nccl}, whose links cannot be given up when a worker dies"
        yield ("problem", "gpus", text, f"install a torch with NCCL {least} or newer, or take transport='tcp'")


def _cupy(node: Node, *, wanted: bool) -> _Complaints:
    """Whether the codecs' kernels can run beside torch: one CuPy, of its CUDA.

    Args:
        wanted: a run is to use them.
    """
    fits = f"cupy-cuda{node.cuda_build.partition('.')[0]}x"
    extra = fits.removeprefix("cupy-").removesuffix("x")
    others = [name for name in node.cupy if name not in (fits, "cupy")]  # "cupy" is built for what is there
    if others:
        text = f"node {_name(node)} has {' and '.join(node.cupy)} beside a torch for CUDA {node.cuda_build}"
        text += ": codecs fail on its GPUs"
        yield ("warning", "gpus", text, f"`pip uninstall {' '.join(others)}`, then `pip install 'raypipe[{extra}]'`")
    elif wanted and not node.cupy:
        text = f"node {_name(node)} has no CuPy, so that its processor encodes and decodes what stages send"
        yield ("warning", "gpus", text, f"`pip install 'raypipe[{extra}]'`")


def _shared_memory(nodes: list[Node], facts: Facts, wishes: Wishes) -> _Complaints:
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


def _storage(nodes: list[Node], facts: Facts, wishes: Wishes) -> _Complaints:
    for node in nodes:
        if node.storage_error:
            text = f"node {_name(node)} cannot write to {wishes.storage}: {node.storage_error}"
            yield ("problem", "storage", text, "change its rights, or give another run_config.storage_path")
        elif not node.storage_shared:
            text = f"{wishes.storage} of node {_name(node)} is another folder than here: checkpoints would be in pieces"
            yield ("problem", "storage", text, "mount one folder on all nodes, or take s3:// or gs:// as storage_path")


def _cpus(nodes: list[Node], facts: Facts, wishes: Wishes) -> _Complaints:
    wanted = wishes.num_workers * wishes.resources.get("CPU", 1)
    if facts.address and not facts.error:
        there = sum(node.ray_cpus for node in nodes)
        if wanted > there:
            text = f"{wishes.num_workers} workers want {wanted:g} CPUs, Ray has {there:g}: some would wait for ever"
            yield ("problem", "cpus", text, "take fewer num_workers, less CPU in resources_per_worker, or add nodes")
    elif wanted > (there := sum(node.cpus for node in nodes)):
        text = f"{wishes.num_workers} workers want {wanted:g} CPUs and share {there}: it works, slowly"
        yield ("warning", "cpus", text, "take fewer num_workers")


_CHECKS: Mapping[str, Callable[[list[Node], Facts, Wishes], _Complaints]] = {
    "versions": _versions,
    "ports": _ports,
    "gpus": _gpus,
    "shm": _shared_memory,
    "storage": _storage,
    "cpus": _cpus,
}


def _all_well(subject: str, nodes: list[Node], facts: Facts, wishes: Wishes) -> str:
    """What is there, in one line, where nobody complains."""
    if not nodes:
        return "not known: no node answered"
    ray_gives = bool(facts.address) and not facts.error
    cpus = sum(node.ray_cpus if ray_gives else node.cpus for node in nodes)
    return {
        "versions": ", ".join(f"{package} {there}" for package, there in facts.here.items()),
        "ports": f"{wishes.ports[0]}-{wishes.ports[1]} are open" if wishes.ports else "open, of those the system gives",
        "gpus": f"{sum(node.cuda_gpus for node in nodes)}",
        "shm": f"/dev/shm has at least {human_bytes(min(node.shm_bytes for node in nodes))}",
        "storage": f"{wishes.storage} can be written to" if "://" not in wishes.storage else "a URI, not tried",
        "cpus": f"{cpus:g}",
    }[subject]


def _name(node: Node) -> str:
    return f"{node.address} ({node.host})" if node.host and node.host != node.address else node.address


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
