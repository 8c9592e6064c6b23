"""The measured runs of ``bench/simulate``: a trainer that predicts, then trains."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.bench.simulate.predictions import WARM_UP_STEPS, Prediction, Settings, jittered, stage_times_s
from jobs.lib.common import machine_line


class _Sleep(torch.autograd.Function):
    """Sleeps as an accelerator would work; its result and its gradients are what came in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block: Sleeper) -> torch.Tensor:
        share, ctx.share = block.next_shares()
        ctx.block = block
        time.sleep(jittered(block.forward_s, share))
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(jittered(ctx.block.backward_s, ctx.share))
        return gradient, gradient.sum().reshape(1), None


class Sleeper(nn.Module):
    """A stage that takes ``forward_s`` and ``backward_s``, with jitter."""

    def __init__(self, forward_s: float, backward_s: float, seed: int) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.seed = seed
        self.weight = nn.Parameter(torch.zeros(1))
        # A buffer, because a stage is a copy: what else a module remembers between its calls is refused.
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)

    def next_shares(self) -> tuple[float, float]:
        """Draw two shares from 0 to 1, for a forward and its backward."""
        self.calls += 1
        drawn = random.Random(f"{self.seed} {int(self.calls)}")
        return drawn.random(), drawn.random()


def first_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute a loss in one operation."""
    return output.mean()


def one_run(
    name: str, model: nn.Module, pipeline: dict[str, Any], num_steps: int, local: bool, **more: Any
) -> Prediction:
    """Predict the step of a run by the simulator, then train and measure it.

    Args:
        pipeline: fields of PipelineConfig.
        local: True to train without Ray.
        more: "data", a function that makes a dataset of a given number of samples, and optionally "loss_fn".
    """
    count = pipeline["minibatch_size"] * num_steps
    with tempfile.TemporaryDirectory(prefix="bench-simulate-") as folder:
        trainer = raypipe.PipelineTrainer(
            model,
            loss_fn=more.get("loss_fn", first_of),
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
            train_data=more["data"](count),
            pipeline=raypipe.PipelineConfig(**pipeline),
            scaling_config=SimpleNamespace(num_workers=pipeline["num_stages"], resources_per_worker={"CPU": 0.1}),
            run_config=SimpleNamespace(name="bench", storage_path=folder),
        )
        predicted_s = trainer.simulate().makespan_s
        result = trainer.fit(num_steps=num_steps, local=local, progress=False)
    found = Prediction(name, predicted_s, [record.seconds for record in result.records[WARM_UP_STEPS:]])
    print(
        f"{name}: {found.predicted_s * 1e3:.1f} ms predicted, {found.measured_s * 1e3:.1f} measured; {machine_line()}"
    )
    return found


def emulated(settings: Settings, handicap_s: float, local: bool) -> list[Prediction]:
    """Run stages that sleep: every configuration with times of its own."""
    found = []
    for seed, (stages, microbatches, schedule) in enumerate(settings.emulated):
        times = stage_times_s(stages, seed)
        model = nn.Sequential(*(Sleeper(f + handicap_s, b + handicap_s, seed) for f, b in times))
        pipeline = {
            "num_stages": stages, "minibatch_size": microbatches, "num_microbatches": microbatches,
            "schedule": schedule, "partitioner": tuple(str(s) for s in range(1, stages)),
        }  # fmt: skip
        name = f"{schedule} S={stages} M={microbatches}"
        found.append(one_run(name, model, pipeline, settings.num_steps, local, data=_numbers))
    return found


def _numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.ones(count, 1), torch.ones(count, 1))


def _vectors(count: int) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 256), torch.randint(10, (count,)))


def _texts(count: int) -> TensorDataset:
    torch.manual_seed(0)
    words = torch.randint(128, (count, 65))
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def uneven_mlp() -> nn.Sequential:
    """Make layers from narrow to wide and back."""
    widths = (256, 512, 1024, 1024, 256, 10)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Layer(nn.Module):
    """A transformer's layer, as in GPT-2."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


def small_gpt() -> nn.Sequential:
    """Make an embedding, layers of several inner widths, and a head."""
    inner = (256, 768, 256, 512)
    return nn.Sequential(nn.Embedding(128, 128), *(Layer(128, 4, i) for i in inner), nn.Linear(128, 128))


def next_word(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of the next word."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], TensorDataset], Any, tuple[str, ...]]] = {
    "mlp": (uneven_mlp, _vectors, nn.functional.cross_entropy, ("4",)),
    "gpt": (small_gpt, _texts, next_word, ("3",)),
}


def real(settings: Settings, local: bool) -> list[Prediction]:
    """Run real models on two stages, as many as small machines have processors."""
    found = []
    for name, (make, data, loss_fn, split) in MODELS.items():
        for schedule in ("1f1b", "gpipe"):
            torch.manual_seed(0)
            pipeline = {
                "num_stages": 2, "minibatch_size": 128, "num_microbatches": 8,
                "schedule": schedule, "partitioner": split,
            }  # fmt: skip
            run = one_run(f"{name} {schedule}", make(), pipeline, settings.num_steps, local, data=data, loss_fn=loss_fn)
            found.append(run)
    return found
