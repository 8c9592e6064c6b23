"""Departure of a pod before it stops: a worker's stages leave it, and on the head jobs write a checkpoint and end.

    python jobs/clusters/leave.py worker --seconds 80
    python jobs/clusters/leave.py head --seconds 100

For ``preStop`` of Kubernetes, whose grace period must be longer than these seconds. A worker has Ray drain its node;
the runs on it move their stages to other nodes, with their state, and an idle node ends. On the head, running jobs
are stopped as by ``ray job stop``: each has RAY_JOB_STOP_WAIT_TIME_S for a checkpoint. The exit status is 1 if that
took longer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import ray
from ray.job_submission import JobSubmissionClient

from raypipe.runtime.nodes.preemption import drain_node

POLL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Return exit status 0 if nothing is left on the node, 1 if the time was over first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("head", "worker"))
    parser.add_argument("--seconds", type=float, default=80.0, help="that there are until the node is gone")
    parser.add_argument("--node", default="", help="Ray's id of the node, where it is not the one that this runs on")
    parser.add_argument("--dashboard", default="http://127.0.0.1:8265", help="of the head")
    options = parser.parse_args(arguments)
    deadline_s = time.time() + options.seconds
    left = (
        leave_node(options.node, deadline_s) if options.role == "worker" else stop_jobs(options.dashboard, deadline_s)
    )
    print(f"left: {left}" if left else "nothing is left", flush=True)
    return 1 if left else 0


def leave_node(node: str, deadline_s: float) -> str:
    """Drain a node of the stages of every run, and wait until it has ended.

    Args:
        node: Ray's id of the node; "" for the node of this process.
        deadline_s: Unix seconds.

    Returns:
        "" if the node has ended, else its id or the reason.
    """
    os.environ.setdefault("RAY_ADDRESS", "auto")
    ray.init(log_to_driver=False, logging_level="ERROR")
    node = node or ray.get_runtime_context().get_node_id()
    if refused := drain_node(node, "the pod stops", deadline_s):
        return f"node {node}: {refused}"

    def alive() -> str:
        return node if any(one["NodeID"] == node and one["Alive"] for one in ray.nodes()) else ""

    return _waited(alive, deadline_s)


def stop_jobs(dashboard: str, deadline_s: float) -> str:
    """Stop all jobs that run, and wait until they have ended; returns the ids of those that have not."""
    client = JobSubmissionClient(dashboard)

    def running() -> list[str]:
        return [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]

    for job in running():
        client.stop_job(job)
    return _waited(lambda: ", ".join(running()), deadline_s)


def _waited(left: Callable[[], str], deadline_s: float) -> str:
    while (found := left()) and time.time() < deadline_s:
        time.sleep(POLL_S)
    return found


if __name__ == "__main__":
    sys.exit(main())
