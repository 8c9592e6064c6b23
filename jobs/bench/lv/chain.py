"""What bench/lv times: layers that sleep as an accelerator works, in stages joined by links of 100 Mbit/s.

    layer    sleeps its forward and its backward, and hands on a tensor that it did not fill
    message  waits before its link for bytes / rate, and all behind it wait too; an encoded one has fewer bytes

Nobody computes, so any number of stages shares a few processors. The layers are not equal: some take three times as
long as others, as in networks whose images shrink while their channels grow, and equal numbers of layers are a poor
cut. All candidates run the same layers over the same links.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib.emulated import CPU_SHARE
from jobs.lib.held_links import LEARNING_RATE, Hold

__all__ = [
    "RATE_BYTES_S", "Chain", "Layer", "check_weights", "equal_cut", "layers", "loss_of", "planned_cut", "run_ours",
    "stages_of",
]  # fmt: skip

RATE_BYTES_S = 100e6 / 8
SHAPE = (2, 2, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1)
"""What the layers take, relative to each other."""
FORWARD_SHARE = 1 / 3


class Chain(NamedTuple):
    """The model and its links.

    Attributes:
        stage_s: seconds of an average stage and micro-batch, forward and backward together.
        load: seconds of a message that is not encoded on its link, over ``stage_s``.
    """

    num_stages: int = 8
    num_microbatches: int = 8
    stage_s: float = 0.030
    load: float = 4.0

    @property
    def width(self) -> int:
        """Features of a message, float32; a micro-batch is one sample."""
        return round(self.load * self.stage_s * RATE_BYTES_S / 4)

    @property
    def message_s(self) -> float:
        """Of a message on its link, not encoded."""
        return 4 * self.width / RATE_BYTES_S

    def layer_seconds(self) -> list[tuple[float, float]]:
        """(forward, backward) of one micro-batch, by layer."""
        unit_s = self.num_stages * self.stage_s / sum(SHAPE)
        return [(FORWARD_SHARE * part * unit_s, (1 - FORWARD_SHARE) * part * unit_s) for part in SHAPE]


@functools.cache
def filled(width: int) -> torch.Tensor:
    """What an accelerator would have filled, (1, width): one in every process, which nobody changes."""
    return torch.sin(torch.arange(width, dtype=torch.float32)).unsqueeze(0)


class _Sleep(torch.autograd.Function):
    """The gradient of the weight is one for every micro-batch, which is how the arithmetic of all runs is checked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds[0])
        return filled(layer.width).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        time.sleep(ctx.layer.seconds[1])
        return filled(ctx.layer.of_width) if ctx.needs_input_grad[0] else None, torch.ones(1), None


class Layer(nn.Module):
    """Sleeps.

    Args:
        seconds: forward and backward, of one micro-batch.
        of_width, width: features that come and that go.
    """

    def __init__(self, seconds: tuple[float, float], of_width: int, width: int) -> None:
        super().__init__()
        self.seconds, self.of_width, self.width = seconds, of_width, width
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)


def layers(chain: Chain) -> list[Layer]:
    """All of them; data and output are a single feature."""
    seconds = chain.layer_seconds()
    widths = [1, *[chain.width] * (len(seconds) - 1), 1]
    return [Layer(times, *ends) for times, ends in zip(seconds, itertools.pairwise(widths), strict=True)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One operation; its value does not matter."""
    return output.sum()


# Cuts: the numbers of the layers that begin a stage, but for the first.

Cut = tuple[int, ...]


def equal_cut(chain: Chain) -> Cut:
    """As many layers on every stage: what people write down who have no profile."""
    return tuple(stage * len(SHAPE) // chain.num_stages for stage in range(1, chain.num_stages))


def planned_cut(chain: Chain) -> Cut:
    """What ``partitioner="prefix_sum"`` makes of a profile that is measured here."""
    with tempfile.TemporaryDirectory(prefix="bench-lv-") as folder:
        plan = _trainer(chain, {"num_stages": chain.num_stages, "partitioner": "prefix_sum"}, 1, folder).plan()
    assert plan.partition.bottleneck_s > 0
    return plan.partition.cuts


def stages_of(chain: Chain, cut: Cut) -> list[tuple[float, float]]:
    """(forward, backward) seconds of one micro-batch, by stage."""
    seconds = chain.layer_seconds()
    return [
        (sum(f for f, _ in seconds[a:b]), sum(b_ for _, b_ in seconds[a:b]))
        for a, b in itertools.pairwise((0, *cut, len(seconds)))
    ]


# Ours.


def _occupied(seconds: float, hop: int, forward: bool, step: int, microbatch: int) -> float:
    """A jobs.lib.held_links.Delay that is always the same."""
    return seconds


def _trainer(chain: Chain, fields: Mapping[str, Any], num_steps: int, folder: str) -> raypipe.PipelineTrainer:
    count = chain.num_microbatches * num_steps
    delay = functools.partial(_occupied, chain.message_s)
    return raypipe.PipelineTrainer(
        nn.Sequential(*layers(chain)),
        loss_fn=loss_of,
        optimizer=Hold(delay, chain.num_microbatches, full_bytes=4 * chain.width),
        train_data=TensorDataset(torch.ones(count, 1), torch.ones(count, 1)),
        pipeline=raypipe.PipelineConfig(
            minibatch_size=chain.num_microbatches,
            num_microbatches=chain.num_microbatches,
            transport="tcp",
            **fields,
        ),
        scaling_config=SimpleNamespace(num_workers=chain.num_stages, resources_per_worker={"CPU": CPU_SHARE}),
        run_config=SimpleNamespace(name="run", storage_path=folder),
    )


def run_ours(chain: Chain, cut: Cut, fields: Mapping[str, Any], num_steps: int, *, local: bool = False) -> list[float]:
    """Seconds of every step of one run on Ray actors.

    Args:
        fields: of PipelineConfig: schedule, versions, codecs.
        local: in threads of this process, whose links are free.

    Raises:
        RuntimeError: a layer has not done every micro-batch of every step.
    """
    with tempfile.TemporaryDirectory(prefix="bench-lv-") as folder:
        trainer = _trainer(chain, {"partitioner": tuple(map(str, cut)), **fields}, num_steps, folder)
        result = trainer.fit(num_steps=num_steps, local=local, progress=False)
        weights = raypipe.load_state_dict(result.checkpoint)
    check_weights({name: tensor.item() for name, tensor in weights.items()}, chain.num_microbatches * num_steps)
    return [record.seconds for record in result.records]


def check_weights(weights: Mapping[str, float], microbatches: int) -> None:
    """See to it that so many micro-batches trained every layer.

    Raises:
        RuntimeError: they did not.
    """
    wanted = -LEARNING_RATE * microbatches
    wrong = {name: found for name, found in weights.items() if abs(found - wanted) > 1e-4 * abs(wanted)}
    if wrong or len(weights) != len(SHAPE):
        raise RuntimeError(f"of {len(weights)} layers {wrong} are not {wanted}: not every micro-batch was done")
