"""torch's DistributedDataParallel on the layers of models.py: buckets that overlap the backward, and its bf16 hook.

A rank is a process. Its hook hands each bucket to one thread, which waits for what a ring sends of it at the link's
rate, 2 (R - 1) / R of its bytes, and has gloo sum it then; so buckets go one after the other, beside the backward, as
they do on a network card. The mini-batches are those of raypipe's runs, in the same order, shared out evenly.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch

from jobs.bench.vs_dp.models import accuracy, heldout, loss_of, samples
from jobs.bench.vs_dp.run import EVAL_EVERY, FEW_STEPS, LEARNING_RATE, MINIBATCH, SEED, WARM_UP, Asked, Ran
from jobs.lib.common import median
from jobs.lib.processes import run_processes
from raypipe.engine.data.source import open_data

__all__ = ["run_ddp"]

LIMIT_S = 600.0


def run_ddp(asked: Asked, enough: float, *, bf16: bool = False, bucket_mb: float = 25.0) -> Ran:
    """Train in processes of their own, until accuracy is enough and FEW_STEPS are done, or all steps.

    Args:
        enough: held-out accuracy.
        bf16: gradients are summed in bf16, by torch's ``bf16_compress_hook``.
        bucket_mb: DDP's own default.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-vs-dp-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, asked, enough, bf16, bucket_mb, folder))
            for rank in range(asked.workers)
        ]
        run_processes(ranks, LIMIT_S)
        return Ran(**json.loads((Path(folder) / "found.json").read_text()))


class _Ring:
    """What paces and sums buckets.

    Args:
        rate_bytes_s: of each rank's way out.
    """

    def __init__(self, rate_bytes_s: float, ranks: int) -> None:
        self._rate_bytes_s, self._ranks = rate_bytes_s, ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paced-ring")
        self.sent_bytes = 0.0

    def sum(self, buffer: torch.Tensor, *, bf16: bool) -> torch.futures.Future[torch.Tensor]:
        """The mean of a bucket over all ranks; in bf16 as torch's bf16_compress_hook does it, divided first."""
        import torch.distributed as dist

        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        wire = buffer.to(torch.bfloat16).div_(self._ranks) if bf16 else buffer

        def work() -> None:
            try:
                nbytes = 2 * (self._ranks - 1) / self._ranks * wire.nbytes
                self.sent_bytes += nbytes
                time.sleep(nbytes / self._rate_bytes_s)
                dist.all_reduce(wire)
                found.set_result(buffer.copy_(wire) if bf16 else wire.div_(self._ranks))
            except BaseException as error:  # noqa: BLE001  (told by the future)
                found.set_exception(error)  # type: ignore[arg-type]

        self._thread.submit(work)
        return found


def _rank(rank: int, asked: Asked, enough: float, bf16: bool, bucket_mb: float, folder: str) -> None:
    """One process. A file is the meeting place and gloo chooses its own ports, so none can be taken."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=LIMIT_S), asked.workers, rank)
    try:
        plain, ring = asked.layers.build(SEED), _Ring(asked.rate_bytes_s, asked.workers)
        model = DistributedDataParallel(plain, bucket_cap_mb=bucket_mb)
        # Without annotations, which torch would want to be its own.
        model.register_comm_hook(bf16, lambda bf16, bucket: ring.sum(bucket.buffer(), bf16=bf16))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        data = open_data(samples(), seed=SEED)
        per_epoch, own = data.num_samples // MINIBATCH, MINIBATCH // asked.workers
        seconds, losses, told = [], [], []
        dist.barrier()
        for step in range(asked.steps):
            begin_s = time.monotonic()
            epoch, place = divmod(step, per_epoch)
            rows = data.read(epoch, place * MINIBATCH, MINIBATCH, (0, 1))
            assert isinstance(rows, tuple)
            x, y = (column[rank * own : (rank + 1) * own] for column in rows)
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.monotonic() - begin_s)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / asked.workers)
            if (step + 1) % EVAL_EVERY == 0:
                accurate = torch.tensor([_heldout(plain) if rank == 0 else 0.0])
                dist.broadcast(accurate, 0)
                told.append((step + 1, float(accurate)))
                if step + 1 >= FEW_STEPS and any(value >= enough for _, value in told):
                    break
        if rank == 0:
            found = Ran(
                step_s=median(seconds[WARM_UP:] or seconds),
                step_bytes=asked.workers * ring.sent_bytes / len(losses),
                losses=losses,
                reached=next((step for step, value in told if value >= enough), 0),
                accuracy=told[-1][1] if told else 0.0,
            )
            (Path(folder) / "found.json").write_text(json.dumps(found._asdict()))
        dist.barrier()  # nobody leaves while another one still talks to it
    finally:
        dist.destroy_process_group()


def _heldout(model: torch.nn.Module) -> float:
    inputs, targets = heldout().tensors
    with torch.no_grad():
        found = float(accuracy(model.eval()(inputs), targets))
    model.train()
    return found
