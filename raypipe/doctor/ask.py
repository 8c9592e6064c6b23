"""Gathering the facts for raypipe.doctor.checks: a process of its own asks Ray, so that nothing Ray does can keep us.

this process  --request-->  python -m raypipe.doctor.cluster  --a tiny actor per node-->  nodes
              <--JSON-----
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raypipe.config.ray import resources_of
from raypipe.doctor.checks import Facts, Node, Wishes
from raypipe.runfile.read import RunFile
from raypipe.runtime.driver.knock import auth_mode, token_place

__all__ = ["collect", "wishes_of"]

TIMEOUT_S = 180.0
USUAL_STORAGE = "~/ray_results"


def wishes_of(run: RunFile | None, ports: tuple[int, int] | None) -> Wishes:
    """What a run asks for; without one, the usual storage folder is looked at.

    Args:
        ports: instead of the run's own link_ports.
    """
    values = {} if run is None else run.values
    pipeline = values.get("pipeline") or {}
    links = pipeline.get("link_ports", "auto")
    scaling, settings = values.get("scaling_config") or {}, values.get("run_config") or {}
    workers = scaling.get("num_workers", 0)
    return Wishes(
        ports=ports or (None if links == "auto" else (links[0], links[1])),
        storage=settings.get("storage_path") or str(Path(USUAL_STORAGE).expanduser()),
        num_workers=min(workers) if isinstance(workers, list) else workers,
        resources=resources_of(SimpleNamespace(**scaling)),
        transport=pipeline.get("transport", "auto"),
        codecs=any(pipeline.get(f"codec_{way}", "none") != "none" for way in ("forward", "backward")),
    )


def collect(address: str, wishes: Wishes, devices: str = "/dev", timeout_s: float = TIMEOUT_S) -> Facts:
    """Ask the cluster, or this machine where ``address`` is empty or the cluster does not let us in.

    Args:
        devices: folder of the device files.
        timeout_s: after which a cluster counts as one that cannot be reached.
    """
    low, high = wishes.ports or (0, 0)
    storage = "" if "://" in wishes.storage else wishes.storage
    request = {"address": address, "devices": devices, "storage": storage, "low": low, "high": high}
    mode, token = auth_mode(address), token_place()
    if address and mode == "token" and not token:
        # Ray ends a process that asks without a token when it was told that there is one.
        answer: dict[str, Any] = {"nodes": [], "error": "there is no token", "kind": "authentication"}
    else:
        answer = _ask(request, timeout_s)
    if not answer["nodes"] and address:
        # What this machine says for itself may be the reason.
        answer = {**_ask({**request, "address": ""}, timeout_s), "error": answer["error"], "kind": answer["kind"]}
    known = {field.name for field in fields(Node)}
    return Facts(
        address=address,
        nodes=tuple(Node(**{k: v for k, v in node.items() if k in known}) for node in answer["nodes"]),
        here=answer.get("here", {}),
        error=answer.get("error", ""),
        kind=answer.get("kind", ""),
        auth_mode=mode,
        token=token,
    )


def _ask(request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "raypipe.doctor.cluster", json.dumps(request)]
    asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, complained = asked.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        said, complained = "", f"no answer within {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(asked.pid, signal.SIGKILL)
        asked.wait()
        for stream in (asked.stdout, asked.stderr):
            if stream is not None:
                stream.close()
    try:
        answer: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line.strip() for line in complained.splitlines() if line.strip()]
        # Where Ray ends the process itself, the reason stands above a long trace.
        reasons = [line for line in lines if "Check failed" in line] or lines[-1:] or ["it said nothing"]
        return {"nodes": [], "error": reasons[0], "kind": "silence"}
    return answer
