"""One rank of torch.distributed.pipelining over gloo for bench/links: all of torch's schedules, and plans of ours.

python jobs/bench/links/torch_peer.py RANK ADDRESS:PORT INTERFACE '{"steps": 9, "plans": {"name": "csv text"}}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

from jobs.bench.links import gpt
from jobs.bench.links.gpt import peak_bytes

# By name of torch: stages that each of the two ranks holds.
SCHEDULES = {
    "GPipe": ((0,), (1,)),
    "1F1B": ((0,), (1,)),
    "Interleaved1F1B": ((0, 2), (1, 3)),
    "LoopedBFS": ((0, 2), (1, 3)),
    "InterleavedZeroBubble": ((0, 2), (1, 3)),
    "ZBVZeroBubble": ((0, 3), (1, 2)),
    "DualPipeV": ((0, 3), (1, 2)),
}
SINGLE = ("GPipe", "1F1B")
LIMIT = timedelta(seconds=120)


def main(rank: int, meeting: str, interface: str, options: dict[str, Any]) -> dict[str, Any]:
    """Measure end times of steps on this rank, by schedule, and its peak resident memory."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", f"tcp://{meeting}", LIMIT, 2, rank)
    found: dict[str, Any] = {}
    try:
        for name in [*options["schedules"], *options["plans"]]:
            found[name] = _timed(rank, name, options)
    finally:
        dist.destroy_process_group()
    return found


def _timed(rank: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    plan, steps = options["plans"].get(name, ""), options["steps"]
    held = SCHEDULES.get(name, SCHEDULES["1F1B"])
    parts = gpt.pieces(sum(map(len, held)), options["half_s"])
    modules = [parts[index] for index in held[rank]]
    count = len(parts)
    stages = [PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, held[rank], strict=True)]
    if plan:
        schedule: Any = _PipelineScheduleRuntime(stages, gpt.MICROBATCHES, loss_fn=gpt.loss_fn, scale_grads=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.csv"
            file.write_text(plan)
            schedule._load_csv(str(file), format="compute_only")
    else:
        kind = get_schedule_class(name)
        schedule = kind(stages[0] if name in SINGLE else stages, gpt.MICROBATCHES, loss_fn=gpt.loss_fn)
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-4)
    inputs, targets = gpt.samples(steps).tensors
    size = gpt.MICROBATCHES * gpt.MICROBATCH_SIZE
    first, last = 0 in held[rank], count - 1 in held[rank]
    ends_s, losses = [], []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    dist.barrier()
    for step in range(steps):
        of_step: list[torch.Tensor] = []
        x = (inputs[step * size : (step + 1) * size],) if first else ()
        y = {"target": targets[step * size : (step + 1) * size], "losses": of_step} if last else {}
        schedule.step(*x, **y, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.monotonic())
        losses.append(float(torch.stack(of_step).detach().mean()) if of_step else 0.0)
    dist.barrier()
    return {"ends_s": ends_s, "losses": losses, "peak_bytes": peak_bytes("self")}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))), flush=True)
