"""What crosses a cut and what does not, where a model may be cut, and what a stage holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import Capture, capture
from raypipe.data.open_data import open_data
from raypipe.engine.stage.randomness import RandomKey
from raypipe.errors import CaptureError
from raypipe.planner.partition.chain import split_before
from tests.exactness import (
    SHAPES,
    Shape,
    by_hand,
    captured,
    expected,
    faults,
    programs,
    same_bits,
    train,
)  # fmt: skip
from tests.models import CASES, Case, case
from tests.trainers import trainer_of

pytestmark = pytest.mark.xdist_group("tracing")

X, Y = CASES["mlp"].data(4)[:4]


def captured_here(model: nn.Module) -> Capture:
    return capture(model, (X, Y), (0, 1), functional.cross_entropy)


def evaluated(name: str, columns: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Compute what the model itself does in evaluation: its output, or its loss if it has its own."""
    model = captured(name)[0]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # eager attention has a fused kernel that no graph has
    model.eval()
    try:
        with torch.no_grad():
            return model(columns[0]) if case(name).loss_fn is not None else model(**columns).loss
    finally:
        model.train()
        torch.backends.mha.set_fastpath_enabled(fast)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "cnn", "attention", "tied-lm", "dropout-sequential", "gpt2", "llama"])
def test_evaluation_is_that_of_the_model(name: str) -> None:
    """The other graph of the same capture, cut to match; for any cut of training."""
    made = captured(name)[1]
    drawn = random.Random(7)
    source = open_data(case(name).data(3), seed=0)
    numbered = case(name).loss_fn is not None
    batch: Any = source.read(0, 0, 3, (0, 1) if numbered else source.columns)
    columns = dict(enumerate(batch)) if numbered else batch
    wanted = evaluated(name, columns)
    for stages in (1, 2, 3, 4):
        cuts = tuple(sorted(drawn.sample(made.graph.cut_positions(), stages - 1)))
        assert same_bits(by_hand(name, cuts, "eval", columns, RandomKey(0, 0, 0))[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "gpt2"])
def test_the_cache_of_operations_that_tests_do_without_changes_no_graph(name: str) -> None:
    """Which users have, as torch sets it; see docs/design/0054."""
    from torch._dynamo import config  # which takes a second to load

    with config.patch(fake_tensor_cache_enabled=not config.fake_tensor_cache_enabled):
        other = captured.__wrapped__(name)[1]
    one = captured(name)[1]
    assert other.graph == one.graph
    for mode in ("train", "eval"):
        found, wanted = (getattr(made.recipe.stages, mode) for made in (other, one))
        assert (found.values, found.outputs, found.names) == (wanted.values, wanted.outputs, wanted.names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blocks"),
    [("gpt2", ["transformer.h.1"]), ("gpt2-untied", ["transformer.h.1"]), ("llama", ["model.layers.1"])],
)
def test_between_blocks_only_the_hidden_state_crosses(name: str, blocks: list[str]) -> None:
    """8 tokens of 16 floats: masks, position tables, cosines and sizes are rebuilt where they are used."""
    made = captured(name)[1]
    partition = split_before(made.graph, blocks)
    assert partition.stages[1].input_bytes == 8 * 16 * 4
    below, above = made.programs(partition.cuts)
    for mode in ("train", "eval"):
        assert getattr(below, mode).num_outputs == getattr(above, mode).num_inputs == 1


class Aliased(nn.Module):
    """Changes y in place while a view of it is still to be read, beside a branch that is free to move."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        seen = y[:, :3]
        y.mul_(2.0)
        z = self.b(torch.sigmoid(x)) + seen.sum(1, keepdim=True)
        return self.c(torch.tanh(z) + y)


class Overwritten(Aliased):
    """Changes y in place, then a part of what came of that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y += 1.0
        y[:, 0] = 0.5
        y.mul_(2.0)
        y.view(-1, 2, 3)[:, 1].add_(1.0)
        return self.c(torch.tanh(self.b(y)))


class StillNorm(nn.Sequential):
    """Its norm stays in evaluation, as fine-tuning has it."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 3)
        )
        self[1].running_mean.fill_(0.5)

    def train(self, mode: bool = True) -> StillNorm:
        super().train(mode)
        self[1].eval()
        return self


class Recounting(nn.Module):
    """One BatchNorm under two names, used twice, a buffer that nobody reads, and one read in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.alias = nn.ModuleList([self.norm])
        self.register_buffer("unread", torch.arange(3.0))
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.alias[0](torch.tanh(self.b(self.norm(self.a(x * self.scale)) * self.scale)))
        return self.c(x * self.scale)


def repeated_norm() -> nn.Module:
    norm = nn.BatchNorm1d(6, affine=False)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Tanh(), nn.Linear(6, 3))


def views_first() -> nn.Module:
    """Wherever it is cut, something works in place on a view of what came, in training or in evaluation."""
    return nn.Sequential(
        nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Identity(), nn.Dropout(0.0), nn.ReLU(inplace=True),
        nn.Linear(6, 6), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("build", [Aliased, Overwritten, StillNorm, Recounting, repeated_norm, views_first])
def test_every_offered_cut_is_exact(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"every-cut-{build.__name__}"
    monkeypatch.setitem(CASES, name, Case(name, build, CASES["mlp"].data, functional.cross_entropy))
    positions = captured(name)[1].graph.cut_positions()
    assert positions
    for cut in positions:
        assert (
            faults(name, train(name, (cut,), SHAPES["even"], "1f1b", "adamw"), expected(name, SHAPES["even"], "adamw"))
            == []
        )


def index_of(made: Capture, word: str, which: int) -> int:
    return [i for i, node in enumerate(made.graph.nodes) if word in node.name][which]


@pytest.mark.parametrize(("build", "word"), [(Recounting, "batch_norm"), (repeated_norm, "")])
def test_a_changing_buffer_stays_in_one_stage(build: Any, word: str) -> None:
    made = captured_here(build())
    first, last = (index_of(made, word, 0), index_of(made, word, -1)) if word else (1, 3)
    assert not set(range(first + 1, last + 1)) & set(made.graph.cut_positions())
    for position in range(first + 1, last + 1):
        with pytest.raises(
            CaptureError, match=r"'(norm|1)\.\w+' is updated during forward and used in stages \[0, 1\]"
        ):
            made.programs((position,))


def test_every_buffer_has_a_home() -> None:
    made = captured_here(Recounting())
    for program in made.programs(made.graph.cut_positions()[:1]):
        assert ("unread" in program.buffers) == (program.index == 0)
        assert "scale" in program.buffers
        assert not any(name.startswith("alias") for name in program.buffers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "attention", "noisy", "gpt2-untied"])
def test_micro_batches_of_one_sample(name: str) -> None:
    shape = Shape(12, 4, 4)
    assert faults(name, train(name, 3, shape, "slack", "adamw"), expected(name, shape, "adamw")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "cnn", "noisy", "tied-lm", "buffers", "dropout-sequential", "gpt2", "llama"])
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_both_modes_hold_the_same_tensors(name: str, stages: int) -> None:
    made = captured(name)[1]
    cut = programs(name, stages)
    for program in cut:
        trained = {site.parameter for site in program.train.sites}
        assert {site.parameter for site in program.eval.sites} == trained
        assert trained <= set(program.parameters)
        assert {*program.train.buffers, *program.eval.buffers} <= set(program.buffers)
    assert {n for program in cut for n in program.parameters} == set(made.parameters)
    assert {n for program in cut for n in program.buffers} == set(made.buffers)
    assert all(made.parameters[n] is p for n, p in captured(name)[0].named_parameters())


class Restless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_evaluation_may_draw_too() -> None:
    """Keyed like training, so that two evaluations agree whatever else draws."""
    model = nn.Sequential(nn.Linear(6, 6), Restless(), nn.Linear(6, 3))
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = trainer_of(model, train_data=CASES["mlp"].data(8), eval_data=CASES["mlp"].data(8))
        losses.append(made.fit(num_steps=1, local=True, progress=False).metrics["eval_loss"])
    assert losses[0] == losses[1]


class Sliced(nn.Module):
    """Takes slices of lists, and has a module under two names, for which torch.export writes the slices into paths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.again = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers[:2], *self.layers[2:][::-1]):
            x = layer(x)
        return self.again(self.blocks[1:](x)).mean()


def test_modules_of_slices_have_their_names() -> None:
    model = Sliced()
    found = capture(model, {"x": torch.randn(2, 4)}, ("x",), None)
    names = [node.module for node in found.graph.nodes if node.param_names]
    assert names == ["layers.0", "layers.1", "layers.3", "layers.2", "blocks.1", "blocks.2"]
    assert not [node.module for node in found.graph.nodes if "slice" in node.module]
