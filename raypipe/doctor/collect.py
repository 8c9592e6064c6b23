"""Collection of the facts for raypipe.doctor.checks, in a separate process, because Ray may hang or end its process.

That process prints its answer as JSON, in the last line of its output. It is killed if it does not answer in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raypipe.config.paths import DEFAULT_STORAGE, absolute_path, is_address
from raypipe.config.ray import resources_of
from raypipe.doctor import node as node_facts
from raypipe.doctor.checks import Facts, NodeFacts, Requirements
from raypipe.runfile.run_file import RunFile
from raypipe.runtime.driver.ray_ping import REACH_TIMEOUT_S, auth_mode, ping_cluster, token_place

TIMEOUT_S = 180.0


def requirements_of(run: RunFile | None, ports: tuple[int, int] | None) -> Requirements:
    """Return the requirements of a run file.

    Args:
        run: None for no run, which requires only that the default storage folder is writable.
        ports: (lowest, highest) port, instead of the run's link_ports; None for link_ports.
    """
    values = {} if run is None else run.values
    pipeline = values.get("pipeline") or {}
    links = pipeline.get("link_ports", "auto")
    scaling, settings = values.get("scaling_config") or {}, values.get("run_config") or {}
    workers = scaling.get("num_workers", 0)
    return Requirements(
        ports=ports or (None if links == "auto" else (links[0], links[1])),
        storage=absolute_path(settings.get("storage_path") or DEFAULT_STORAGE, written=True),
        num_workers=min(workers) if isinstance(workers, list) else workers,
        resources=resources_of(SimpleNamespace(**scaling)),
        transport=pipeline.get("transport", "auto"),
        codecs=any(pipeline.get(f"codec_{way}", "none") != "none" for way in ("forward", "backward")),
    )


def collect(address: str, needs: Requirements, devices: str = "/dev", timeout_s: float = TIMEOUT_S) -> Facts:
    """Collect facts of the cluster; of this machine alone if ``address`` is "" or the cluster cannot be reached.

    Args:
        address: address of the cluster.
        needs: requirements of the run; ports and storage folder are tried.
        devices: folder of the device files.
        timeout_s: seconds without an answer after which the cluster counts as unreachable.
    """
    low, high = needs.ports or (0, 0)
    storage = "" if is_address(needs.storage) else needs.storage
    request = {"address": address, "devices": devices, "storage": storage, "low": low, "high": high}
    mode, token = auth_mode(address), token_place()
    if address and mode == "token" and not token:
        # Ray ends a process that asks without a token when it was told that there is one.
        answer: dict[str, Any] = {"nodes": [], "error": "there is no token", "kind": "authentication"}
    else:
        answer = _query(request, timeout_s)
    if not answer["nodes"] and address:
        # What this machine says for itself may be the reason.
        answer = {**_query({**request, "address": ""}, timeout_s), "error": answer["error"], "kind": answer["kind"]}
    known = {field.name for field in fields(NodeFacts)}
    return Facts(
        address=address,
        nodes=tuple(NodeFacts(**{k: v for k, v in node.items() if k in known}) for node in answer["nodes"]),
        here=answer.get("here", {}),
        error=answer.get("error", ""),
        kind=answer.get("kind", ""),
        auth_mode=mode,
        token=token,
    )


def _query(request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "raypipe.doctor.collect", json.dumps(request)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        output, errors = "", f"no answer within {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    try:
        answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        # Where Ray ends the process itself, the reason stands above a long trace.
        reasons = [line for line in lines if "Check failed" in line] or lines[-1:] or ["no output"]
        return {"nodes": [], "error": reasons[0], "kind": "silence"}
    return answer


NODE_TIMEOUT_S = 60.0


def local_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the facts of this machine alone, without Ray.

    Args:
        request: {"devices": folder of device files, "storage": folder or "", "low", "high": range of ports}.
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


def cluster_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the facts of every node of a cluster.

    Args:
        request: see ``local_facts``; with "address" in addition.

    Returns:
        {"error": reason of a failed connection or "", "kind": kind of that failure or "", "nodes": facts of each node}.
    """
    import ray
    from ray.exceptions import AuthenticationError

    try:
        ping_cluster(request["address"])
        ray.init(address=request["address"], namespace="raypipe", logging_level="ERROR", log_to_driver=False)
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        kind = "authentication" if isinstance(error, AuthenticationError) else type(error).__name__
        return {"error": " ".join(str(error).split()), "kind": kind, "nodes": []}
    try:
        return {"error": "", "kind": "", "nodes": _query_nodes(ray, request)}
    finally:
        ray.shutdown()


def _query_nodes(ray: Any, request: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    """Return the facts of a node that Ray knows: address, id, resources."""
    resources = node["Resources"]
    return {
        "address": node["NodeManagerAddress"],
        "node_id": node["NodeID"],
        "ray_cpus": resources.get("CPU", 0.0),
        "ray_gpus": resources.get("GPU", 0.0),
        "object_store_bytes": int(resources.get("object_store_memory", 0)),
    }


def _probe(ray: Any, node_id: str) -> Any:
    """Start an actor on one node. The node needs no raypipe: Ray sends the code of a class defined in a function."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Probe:
        def __init__(self, source: str) -> None:
            import types

            self.facts = types.ModuleType("raypipe_node_facts")
            exec(compile(source, "node_facts.py", "exec"), self.facts.__dict__)

        def call(self, function: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
            answer: dict[str, Any] = getattr(self.facts, function)(*arguments)
            return answer

    source = Path(node_facts.__file__).read_text(encoding="utf-8")
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(Probe).remote(source)


def _gather(ray: Any, answers: list[dict[str, Any]], probes: list[Any], function: str, arguments: list[Any]) -> None:
    """Call a function on all nodes at once, and merge its results into ``answers``.

    A node without a result gets the key "error".

    Args:
        probes: actors of the nodes, in the order of ``answers``.
        function: name of a function in doctor/node.py.
        arguments: arguments of the call for each node.
    """
    calls = [probe.call.remote(function, argument) for probe, argument in zip(probes, arguments, strict=True)]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=NODE_TIMEOUT_S)
    for answer, ref in zip(answers, calls, strict=True):
        if ref not in ready:
            answer.setdefault("error", f"no answer to {function} within {NODE_TIMEOUT_S:g} s")
            continue
        try:
            answer.update(ray.get(ref))
        except ray.exceptions.RayError as error:
            answer.setdefault("error", str(error).strip().splitlines()[-1])


def _gather_reach(ray: Any, answers: list[dict[str, Any]], probes: list[Any], words: list[str]) -> None:
    """Have every node connect to every other node (a single node to itself), and add the failures to ``answers``.

    Args:
        words: text that each node's listener answers.
    """
    listening = {
        answer["node_id"]: (answer["address"], answer["port"], word)
        for answer, word in zip(answers, words, strict=True)
        if answer.get("port")
    }
    tasks = []
    for answer in answers:
        peers = {other: at for other, at in listening.items() if other != answer["node_id"] or len(answers) == 1}
        tasks.append((peers, REACH_TIMEOUT_S))
    results: list[dict[str, Any]] = [{} for _ in answers]
    _gather(ray, results, probes, "reach", tasks)
    for answer, reached in zip(answers, results, strict=True):
        if "error" in reached:
            answer.setdefault("error", reached.pop("error"))
        addresses = {node_id: f"{host}:{port}" for node_id, (host, port, _) in listening.items()}
        answer["unreachable"] = {addresses[node_id]: why for node_id, why in reached.items() if why}


@contextlib.contextmanager
def _marker(storage: str) -> Iterator[str]:
    """Create a file in the storage folder inside the context. A node that sees this file shares the folder.

    If the storage folder does not exist, the file is in the nearest existing folder above it. The context yields the
    path of the file, or "" if it cannot be written; another check reports that.
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
    """Print facts as JSON; the first argument of the command line is the request, as JSON too."""
    request = json.loads(sys.argv[1])
    answer: dict[str, Any] = cluster_facts(request) if request["address"] else {"nodes": [local_facts(request)]}
    answer["here"] = node_facts.versions()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of Ray that wait for a lost cluster have no further output
