"""torch's own GPipe on the layers of chain.py: torch.distributed.pipelining over gloo, its messages held as ours are.

A stage is a process. One thread per neighbour waits for what a message takes on the link and then sends it, so a link
carries one message at a time each way, as in jobs/lib/held_links.py. torch has no hook there, so the function of its
own that posts sends and receives is replaced.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jobs.bench.lv.chain import RATE_BYTES_S, Chain, Cut, check_weights, layers, loss_of
from jobs.lib.held_links import LEARNING_RATE
from jobs.lib.processes import run_processes

__all__ = ["run_torch"]

LIMIT_S = 300.0


class _Sent:
    """A message that a thread sends."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result(LIMIT_S)


class HeldLinks:
    """Posts what torch's stages send and receive: receives at once, sends one after the other and held.

    Args:
        rate_bytes_s: of every link, each way.
    """

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def post(self, ops: list[Any], desc: str | None = None) -> list[Any]:
        """In place of torch's ``_batch_p2p``.

        Args:
            ops: torch.distributed.P2POp.
        """
        import torch.distributed as dist

        return [
            self._send(op)
            if op.op is dist.isend
            else op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)
            for op in ops
        ]

    def _send(self, op: Any) -> _Sent:
        import torch.distributed as dist

        thread = self._threads.setdefault(op.peer, ThreadPoolExecutor(1, thread_name_prefix="held-link"))

        def held() -> None:
            time.sleep(op.tensor.nbytes / self._rate_bytes_s)
            dist.send(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)

        return _Sent(thread.submit(held))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()


def run_torch(chain: Chain, cut: Cut, num_steps: int) -> list[float]:
    """Seconds of every step but the first, a step ending when its last stage does.

    Raises:
        RuntimeError: a process failed, or has not done every micro-batch of every step.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-lv-") as folder:
        ranks = range(chain.num_stages)
        run_processes(
            [context.Process(target=_stage, args=(rank, chain, cut, num_steps, folder)) for rank in ranks], LIMIT_S
        )
        files = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in ranks]
    check_weights(
        {f"{rank}.{name}": found for rank, file in enumerate(files) for name, found in file["weights"].items()},
        chain.num_microbatches * num_steps,
    )
    # All processes read the same clock.
    ends_s = [max(at) for at in zip(*(file["ends_s"] for file in files), strict=True)]
    return [after - before for before, after in itertools.pairwise(ends_s)]


def _stage(rank: int, chain: Chain, cut: Cut, num_steps: int, folder: str) -> None:
    """One process. A file is the meeting place and gloo chooses its own ports, so none can be taken."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=LIMIT_S), chain.num_stages, rank)
    links = HeldLinks(RATE_BYTES_S)
    post: Callable[..., list[Any]] = links.post
    schedules._batch_p2p = post
    try:
        edges = (0, *cut, len(chain.layer_seconds()))
        module = nn.Sequential(*layers(chain)[edges[rank] : edges[rank + 1]])
        stepper = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        stage = PipelineStage(module, rank, chain.num_stages, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, chain.num_microbatches, loss_of, scale_grads=False)
        ones = torch.ones(chain.num_microbatches, 1)
        inputs = [ones] if rank == 0 else []
        last: dict[str, Any] = {"target": ones} if rank == chain.num_stages - 1 else {}
        ends_s = []
        for _ in range(num_steps):
            schedule.step(*inputs, **last, return_outputs=False)
            stepper.step()
            stepper.zero_grad()
            ends_s.append(time.monotonic())
        weights = {name: found.item() for name, found in module.named_parameters()}
        (Path(folder) / f"{rank}.json").write_text(json.dumps({"ends_s": ends_s, "weights": weights}))
        dist.barrier()  # nobody leaves while another one still talks to it
    finally:
        links.close()
        dist.destroy_process_group()
