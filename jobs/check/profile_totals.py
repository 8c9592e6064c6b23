"""Whether the seconds of a profile add up: its total against a step of the whole model in plain PyTorch.

Both are measured in turn, several times, with one thread: forward, loss, backward with gradients added to those of the
micro-batch before. ``raw`` is what the operations took before they were scaled to the whole in one piece.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from jobs.lib import common
from jobs.lib.common import machine_line
from jobs.lib.vision_nets import IMAGE_SIZES, build
from raypipe.engine.capture import capture
from raypipe.engine.profiling import profile_graph
from raypipe.engine.profiling.rounds import Moment, seconds_between

__all__ = ["profile_totals"]

BATCH = 4
STEPS = 5


def profile_totals(rounds: int) -> dict[str, Any]:
    """Print a table of the ten nets; returns its rows."""
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    for name, side in IMAGE_SIZES.items():
        net = build(name).train()
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(BATCH, 3, side, side, generator=drawn)
        y = torch.randint(0, 10, (BATCH,), generator=drawn)
        captured = capture(net, (x, y), ("x", "y"), torch.nn.functional.cross_entropy, evaluates=False)
        ratios, raws = [], []
        totals, wholes = [], []
        for _ in range(rounds):
            before_s = eager_step_s(net, x, y)
            found = profile_graph(captured, {"x": x, "y": y}, sizes=())
            whole_s = (before_s + eager_step_s(net, x, y)) / 2
            total_s = found.forward_s + found.backward_s
            ratios.append(total_s / whole_s)
            totals.append(total_s)
            wholes.append(whole_s)
            raws.append(found.raw_ratio)
        measured = all(node.source == "measured" for node in found.graph.nodes)
        raw = [statistics.median(ratio[i] for ratio in raws) for i in (0, 1)]
        rows.append(
            [name, len(found.graph.nodes), "yes" if measured else "no", statistics.median(totals) * 1e3,
             statistics.median(wholes) * 1e3, statistics.median(ratios), *raw]
        )  # fmt: skip
        print(f"{name}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; {machine_line()}", flush=True)
    columns = ("net", "operations", "all measured", "profile ms", "step ms", "ratio", "raw forward", "raw backward")
    print(common.table("a profile's total against a whole step, processor seconds", columns, rows))
    return {"profile_totals": rows}


def eager_step_s(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Median seconds of a forward and backward of one micro-batch."""
    seconds = []
    for _ in range(STEPS + 1):
        begin = Moment.now()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        seconds.append(seconds_between(begin, Moment.now()))
    return statistics.median(seconds[1:])
