"""One rank of torch.distributed.pipelining that carries out our plans on gloo; run by test_torch_peer.py.

python torch_peer.py RANK WORLD FOLDER    reads FOLDER/batch.safetensors and *.csv, writes gradients
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTHS = (6, 8, 8, 7, 8, 5, 3)


def model() -> nn.Sequential:
    """The same on every rank and in the test; children 0, 1, 2, ... are Linear, Tanh, Linear, ..."""
    torch.manual_seed(11)
    pairs = [(nn.Linear(i, o), nn.Tanh()) for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)]  # noqa: RUF007
    return nn.Sequential(*(child for pair in pairs for child in pair))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    batch = load_file(folder / "batch.safetensors")
    cuts = [int(word) for word in (folder / "cuts.txt").read_text().split()]
    bounds = [0, *cuts, len(model())]
    for plan in sorted(folder.glob("*.csv")):
        count = int(plan.stem.rpartition("-")[2])
        children = list(model().named_children())[bounds[rank] : bounds[rank + 1]]
        module = nn.Sequential(OrderedDict(children))
        stage = PipelineStage(module, rank, world, torch.device("cpu"))
        runtime = _PipelineScheduleRuntime([stage], count, loss_fn=loss, scale_grads=False)
        runtime._load_csv(str(plan), format="compute_only")
        losses: list[torch.Tensor] = []
        inputs = (batch["inputs"],) if rank == 0 else ()
        last = {"target": batch["targets"], "losses": losses} if rank == world - 1 else {}
        runtime.step(*inputs, **last)
        gradients = {name: p.grad for name, p in module.named_parameters()}
        save_file(
            {**gradients, **({"loss": torch.stack(losses)} if losses else {})}, folder / f"{plan.stem}.{rank}.out"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
