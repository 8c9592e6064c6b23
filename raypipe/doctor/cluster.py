"""Asking every node of a cluster what it has: a tiny actor per node, which runs node_facts.py and goes.

This is a program of its own, ``python -m raypipe.doctor.cluster REQUEST``, whose last line of output is the answer
as JSON: whatever Ray does when it cannot connect (wait, or end the process), the one who asked goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypipe.doctor import node as node_facts
from raypipe.runtime.driver.knock import REACH_TIMEOUT_S, knock

__all__ = ["ask_cluster", "ask_here"]

NODE_TIMEOUT_S = 60.0


def ask_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of this machine alone, without Ray.

    Args:
        request: devices, storage ("" for no local folder), low and high of the ports.
    """
    word = uuid.uuid4().hex
    ports = node_facts.listen("127.0.0.1", request["low"], request["high"], word)
    if ports["port"]:
        reached = node_facts.reach({"itself": ("127.0.0.1", ports["port"], word)}, REACH_TIMEOUT_S)
        ports["unreachable"] = {name: why for name, why in reached.items() if why}
    return {
        **node_facts.machine_facts(request["devices"], False),
        **(node_facts.storage_facts(request["storage"], "") if request["storage"] else {}),
        **ports,
        "address": "this machine",
    }


def ask_cluster(request: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of every node, or why there are none: {"error", "kind", "nodes"}.

    Args:
        request: as for ask_here, and address.
    """
    import ray
    from ray.exceptions import AuthenticationError

    try:
        knock(request["address"])
        ray.init(address=request["address"], namespace="raypipe", logging_level="ERROR", log_to_driver=False)
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        kind = "authentication" if isinstance(error, AuthenticationError) else type(error).__name__
        return {"error": " ".join(str(error).split()), "kind": kind, "nodes": []}
    try:
        return {"error": "", "kind": "", "nodes": _ask_nodes(ray, request)}
    finally:
        ray.shutdown()


def _ask_nodes(ray: Any, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answers = [_about(node) for node in nodes]
    probes = [_probe(ray, node["NodeID"]) for node in nodes]
    try:
        _gather(ray, answers, probes, "machine_facts", [(request["devices"], True)] * len(nodes))
        if request["storage"]:
            with _marker(request["storage"]) as marker:
                _gather(ray, answers, probes, "storage_facts", [(request["storage"], marker)] * len(nodes))
        words = [uuid.uuid4().hex for _ in nodes]
        ports = [(a["address"], request["low"], request["high"], w) for a, w in zip(answers, words, strict=True)]
        _gather(ray, answers, probes, "listen", ports)
        _gather_reach(ray, answers, probes, words)
    finally:
        for probe in probes:
            ray.kill(probe)
    return answers


def _about(node: Mapping[str, Any]) -> dict[str, Any]:
    """What Ray says about a node."""
    resources = node["Resources"]
    return {
        "address": node["NodeManagerAddress"],
        "node_id": node["NodeID"],
        "ray_cpus": resources.get("CPU", 0.0),
        "ray_gpus": resources.get("GPU", 0.0),
        "object_store_bytes": int(resources.get("object_store_memory", 0)),
    }


def _probe(ray: Any, node_id: str) -> Any:
    """An actor on one node. Defined in here, so that Ray sends its code along instead of the name of a module."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Probe:
        def __init__(self, source: str) -> None:
            import types

            self.facts = types.ModuleType("raypipe_node_facts")
            exec(compile(source, "node_facts.py", "exec"), self.facts.__dict__)

        def ask(self, function: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
            answer: dict[str, Any] = getattr(self.facts, function)(*arguments)
            return answer

    source = Path(node_facts.__file__).read_text(encoding="utf-8")
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(Probe).remote(source)


def _gather(ray: Any, answers: list[dict[str, Any]], probes: list[Any], function: str, arguments: list[Any]) -> None:
    """Ask all nodes at once; what a silent or failing one leaves open is said in its "error"."""
    asked = [probe.ask.remote(function, given) for probe, given in zip(probes, arguments, strict=True)]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=NODE_TIMEOUT_S)
    for answer, ref in zip(answers, asked, strict=True):
        if ref not in ready:
            answer.setdefault("error", f"no answer to {function} within {NODE_TIMEOUT_S:g} s")
            continue
        try:
            answer.update(ray.get(ref))
        except ray.exceptions.RayError as error:
            answer.setdefault("error", str(error).strip().splitlines()[-1])


def _gather_reach(ray: Any, answers: list[dict[str, Any]], probes: list[Any], words: list[str]) -> None:
    """Every node connects to every other one; a lone one to itself."""
    listening = {
        answer["node_id"]: (answer["address"], answer["port"], word)
        for answer, word in zip(answers, words, strict=True)
        if answer.get("port")
    }
    tasks = []
    for answer in answers:
        peers = {other: at for other, at in listening.items() if other != answer["node_id"] or len(answers) == 1}
        tasks.append((peers, REACH_TIMEOUT_S))
    found: list[dict[str, Any]] = [{} for _ in answers]
    _gather(ray, found, probes, "reach", tasks)
    for answer, reached in zip(answers, found, strict=True):
        if "error" in reached:
            answer.setdefault("error", reached.pop("error"))
        addresses = {node_id: f"{host}:{port}" for node_id, (host, port, _) in listening.items()}
        answer["unreachable"] = {addresses[node_id]: why for node_id, why in reached.items() if why}


@contextlib.contextmanager
def _marker(storage: str) -> Iterator[str]:
    """Inside, a file lies in the storage folder for other nodes to see, or in the nearest folder above it; "" if not.

    A folder that this machine may not write to has a finding of its own.
    """
    folder = Path(storage)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(prefix=".raypipe-doctor-", dir=folder) as marker:
            yield marker.name
    except OSError:
        yield ""


def main() -> None:
    """Answer the request in argv on standard output."""
    request = json.loads(sys.argv[1])
    answer: dict[str, Any] = ask_cluster(request) if request["address"] else {"nodes": [ask_here(request)]}
    answer["here"] = node_facts.versions()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of Ray that wait for a lost cluster have nothing more to say
