"""Training in bf16 and fp16 equals plain PyTorch doing the same in one process, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.data import open_data
from tests.exactness import Recorder, same_bits
from tests.runs.plain_precision import Plain, train_plain

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

STEPS, MINIBATCH, MICROBATCHES = 4, 8, 4
FIELDS: dict[str, Any] = {"minibatch_size": MINIBATCH, "num_microbatches": MICROBATCHES, "max_grad_norm": 0.5}


class Words(nn.Module):
    """A small language model: an embedding, attention, norms, a head; the type of h is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23)
        self.register_buffer("places", torch.linspace(-1, 1, 16))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.embedding(words)
        h = self.blocks(h + self.places.to(h.dtype))
        return self.head(self.norm(h)).flatten(0, 1)


def words() -> nn.Module:
    torch.manual_seed(3)
    return Words()


def children() -> nn.Module:
    """Its children run as they are, untraced."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 3),
    )  # fmt: skip


def of_words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float(), target.flatten())


def of_classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def data_of(model: nn.Module, samples: int = 40) -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    if isinstance(model, nn.Sequential):
        return TensorDataset(torch.randn(samples, 6, generator=drawn), torch.randint(0, 3, (samples,), generator=drawn))
    tokens = torch.randint(0, 23, (samples, 6), generator=drawn)
    return TensorDataset(tokens[:, :5], tokens[:, 1:])


def microbatches_of(data: TensorDataset, steps: int = STEPS) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The samples of every micro-batch, in the order in which a run takes them."""
    order, size = open_data(data, seed=0), MINIBATCH // MICROBATCHES
    per_epoch = len(data) // MINIBATCH
    return [
        [
            tuple(order.read(step // per_epoch, step % per_epoch * MINIBATCH + at, size, (0, 1)))  # type: ignore[misc]
            for at in range(0, MINIBATCH, size)
        ]
        for step in range(steps)
    ]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def trainer(model: nn.Module, folder: Path, optimizer: Any = adamw, data: Any = None, **fields: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model,
        loss_fn=of_classes if isinstance(model, nn.Sequential) else of_words,
        optimizer=optimizer,
        train_data=data if data is not None else data_of(model),
        pipeline=PipelineConfig(**{"num_stages": 2, "partitioner": "parameters", **FIELDS, **fields}),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )  # type: ignore[arg-type]


def faults(model: nn.Module, folder: Path, plain: Plain, steps: int = STEPS, **fields: Any) -> list[str]:
    """Train it in threads; what differs from plain PyTorch."""
    recorder = Recorder(torch.optim.AdamW, lr=1e-2)
    result = trainer(model, folder, recorder, **fields).fit(num_steps=steps, local=True, progress=False)
    found = [] if [r.loss for r in result.records] == plain.losses else ["losses"]
    found += [] if [r.grad_norm for r in result.records] == plain.norms else ["norms"]
    if len(recorder.steps) != len(plain.gradients):
        found.append(f"{len(recorder.steps)} steps")
    for step, (one, other) in enumerate(zip(recorder.steps, plain.gradients, strict=False)):
        found += [f"gradient of {name} in {step}" for name in other if not same_bits(one[name], other[name])]
    trained = load_state_dict(str(folder / "run"))
    found += [f"parameter {name}" for name, x in plain.parameters.items() if not same_bits(trained[name], x)]
    return found


def plainly(model: nn.Module, precision: str, **more: Any) -> Plain:
    loss_fn = of_classes if isinstance(model, nn.Sequential) else of_words
    steps = microbatches_of(data_of(model))
    return train_plain(model, loss_fn, steps, adamw, precision, FIELDS["max_grad_norm"], **more)


SCHEDULES: Sequence[dict[str, Any]] = (
    {"schedule": "1f1b", "num_stages": 3},
    {"schedule": "gpipe"},
    {"schedule": "zb-h1", "num_stages": 3},
    {"schedule": "1f1b", "num_stages": 3, "recompute": "always"},
    {"schedule": "zb-h1", "recompute": "always"},
)


@pytest.mark.parametrize("fields", SCHEDULES, ids=lambda f: "-".join(str(v) for v in f.values()))
@pytest.mark.parametrize("make", [words, children])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
def test_equal_to_plain_pytorch(precision: str, make: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    model = make()
    plain = plainly(model, precision)
    assert faults(model, tmp_path, plain, precision=precision, **fields) == []
    other = plainly(model, "fp32")
    assert other.losses != plain.losses, "the precision does nothing"
