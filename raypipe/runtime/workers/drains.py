"""Ray's list of nodes that are about to go: what others have put there, and a word of our own. The only file that asks.

Ray has no public interface for it. Its own trainer reads the same list, and ``ray drain-node`` writes to it (Ray 2.60);
a release that lacks one of them is met with an empty list, or a reason why not.

A drained node takes no new actors, those that it has go on, and nothing ends at the deadline: it is a hint.
"""

from __future__ import annotations

import importlib
from typing import Any

import ray

__all__ = ["drain_node", "draining_nodes"]


def draining_nodes() -> dict[str, float | None]:
    """Nodes that are being drained, by Ray's id of them -> Unix seconds of the deadline; None where there is none.

    The deadline is by the clock of whoever asked for the drain.
    """
    state = getattr(_module("ray._private.state"), "state", None)
    ask = getattr(state, "get_draining_nodes", None)
    if ask is None:
        return {}
    return {str(node): deadline_ms / 1e3 if deadline_ms else None for node, deadline_ms in ask().items()}


def drain_node(node: str, reason: str, deadline_s: float | None) -> str:
    """Tell Ray that a node is about to be taken away; "" where Ray has noted it, else why not.

    Args:
        node: Ray's id of it, in hexadecimal digits.
        reason: for people.
        deadline_s: Unix seconds; None where nobody knows.
    """
    client: Any = getattr(_module("ray._raylet"), "GcsClient", None)
    reasons: Any = getattr(_module("ray.core.generated.autoscaler_pb2"), "DrainNodeReason", None)
    gcs: Any = None if client is None else client(address=ray.get_runtime_context().gcs_address)
    if not hasattr(gcs, "drain_node") or reasons is None:
        return f"Ray {ray.__version__} has no interface for it that raypipe knows"
    preempted = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")  # which Ray may not refuse for a node that is busy
    accepted, refusal = gcs.drain_node(node, preempted, reason, int((deadline_s or 0.0) * 1e3))
    return "" if accepted else str(refusal) or "Ray refused without a reason"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
