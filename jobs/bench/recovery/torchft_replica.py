"""One replica of torchft as its own example shows it: ``torchft_replica.py REPLICA LIGHTHOUSE MEGABYTES FOLDER``.

Gradients are summed by the manager after the backward: the hook of torchft's DistributedDataParallel (0.2.0) ends the
survivor with an AssertionError when its peer dies.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository's root

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

from jobs.bench.recovery.peer_net import data_of, model_of, say_step

GROUP_TIMEOUT_S, MANAGER_TIMEOUT_S = 5, 10
"""Value of torchft's own example."""


def main() -> None:
    """Train until it is ended."""
    replica, lighthouse, megabytes, folder = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    plain, width = model_of(megabytes)
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)

    def load(state: dict[str, Any]) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=GROUP_TIMEOUT_S)),
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=MANAGER_TIMEOUT_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, inner)
    while True:
        step = manager.current_step()
        x, y = data_of(width, step)
        optimizer.zero_grad()
        loss = (plain(x)[:, 0] - y).square().mean()
        loss.backward()
        for work in [manager.allreduce(p.grad) for p in plain.parameters() if p.grad is not None]:
            work.wait()
        optimizer.step()
        if manager.current_step() > step:  # not one that was given up
            say_step(folder / "steps", replica, manager.current_step())


if __name__ == "__main__":
    main()
