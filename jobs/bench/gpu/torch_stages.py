"""torch.distributed.pipelining in one process: the GPT of the benchmark as one stage or as two on one device.

One process is one rank, and between stages of one rank torch hands tensors over as they are: NCCL makes no link between
two ranks on one GPU, and gloo sends nothing from one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jobs.lib.on_device import sent
from jobs.train.lm import GPT, loss_fn
from raypipe.engine.device.device import Device

__all__ = ["steps"]


class _Part(nn.Module):
    """The first or the second half of a GPT, or all of it, under autocast."""

    def __init__(self, model: GPT, first: bool, last: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        blocks = list(model.blocks)
        self.blocks = nn.ModuleList(blocks[0 if first else half : None if last else half])
        self.first, self.last = first, last
        if first:
            self.embed, self.position = model.embed, model.position
        if last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            if self.first:
                x = self.embed(x.long()) + self.position(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)) if self.last else x


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.autocast(output.device.type, torch.bfloat16, cache_enabled=False):
        return loss_fn(output, target)


def steps(
    model: GPT, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], make_optimizer: Any, device: Device,
    num_stages: int, num_microbatches: int,
) -> Iterator[None]:  # fmt: skip
    """Run one step at each turn, finished when it returns; 1F1B for one stage, torch's interleaved 1F1B for two.

    Args:
        batches: (inputs, targets) of mini-batches, in host memory.
        num_stages: 1 or 2.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    class Stage(PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return []  # torch 2.11 would send to its own rank, for which gloo has no link

    place = device.place
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parts = [_Part(model, i == 0, i == num_stages - 1).to(place) for i in range(num_stages)]
        stages = [Stage(part, i, num_stages, place) for i, part in enumerate(parts)]
        schedule: Any = (
            Schedule1F1B(stages[0], num_microbatches, loss_fn=_loss)
            if num_stages == 1
            else ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=_loss)  # type: ignore[arg-type]
        )
        optimizer = make_optimizer([p for part in parts for p in part.parameters()])
        for x, y in batches:
            losses: list[torch.Tensor] = []
            inputs, targets = sent((x, y), place)
            schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            float(torch.stack(losses).detach().mean())
            yield
    finally:
        dist.destroy_process_group()
