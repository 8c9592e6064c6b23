"""Models whose weights only the workers hold: the same run, to the bit, as one that was given the whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import raypipe
from raypipe.api.export import export_hugging_face
from raypipe.errors import ConfigError
from tests.hugging_face import hugging_face
from tests.models import Case
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]


def trainer(case: Case, folder: Path, name: str = "run", **given: Any) -> raypipe.PipelineTrainer:
    """Of two stages, unless the fields say otherwise."""
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    given = {"loss_fn": case.loss_fn, "train_data": case.data(8), "minibatch_size": 4, "num_microbatches": 2, **given}
    return trainer_of(case.build, folder, name, optimizer=optimizer, **given)


def trained(case: Case, folder: Path, name: str, **given: Any) -> tuple[dict[str, torch.Tensor], list[float], str]:
    """State and losses of two steps, and the folder of the run."""
    result = trainer(case, folder, name, **given).fit(num_steps=2, local=True, progress=False)
    return raypipe.load_state_dict(result.path), [record.loss for record in result.records], result.path


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def shards(case: Case, folder: Path) -> Path:
    """As transformers writes them."""
    torch.manual_seed(1)
    case.build().save_pretrained(folder / "weights", max_shard_size="10KB")
    assert (folder / "weights" / "model.safetensors.index.json").exists()
    return folder / "weights"


@pytest.mark.parametrize(
    ("name", "fields"), [("gpt2", {}), ("llama", {"precision": "bf16", "recompute": "always"})], ids=["gpt2", "llama"]
)
def test_shards_and_the_whole_model_train_alike(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    case = hugging_face(name)
    weights = shards(case, tmp_path)
    whole, losses, _ = trained(case, tmp_path, "whole", init_from=weights, weights_on="client", **fields)
    parts, same_losses, run = trained(case, tmp_path, "parts", init_from=weights, weights_on="workers", **fields)
    assert losses == same_losses
    assert_same(whole, parts)
    # what it becomes loads as a model of transformers again, tied tensors stored once
    export_hugging_face(run, tmp_path / "exported", weights, file_bytes=10_000)
    assert (tmp_path / "exported" / "model.safetensors.index.json").exists()
    loaded = type(case.build()).from_pretrained(tmp_path / "exported")
    assert_same(loaded.state_dict(), parts)
    # and its checkpoint evaluates without being read here
    evaluating = trainer(case, tmp_path, "parts", weights_on="workers", **fields)
    held = trainer(case, tmp_path, "whole", weights_on="client", **fields)
    data = case.data(8)
    losses_of = [made.evaluate(run, data, local=True)["eval_loss"] for made in (evaluating, held)]
    assert losses_of[0] == losses_of[1]


class Blocks(nn.Module):
    """Traced, with a loss_fn; a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        # Not torch.linspace: once transformers has built a model, its tensors are not on torch.device("meta").
        self.register_buffer("scale", 1 + torch.arange(8) / 7)
        self.register_buffer("shift", torch.arange(8) / 7, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))) * self.scale + self.shift)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(8, 3))


def rows(count: int) -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(
        torch.randn(count, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn)
    )


def plain_case(build: Callable[[], nn.Module]) -> Case:
    return Case("plain", build, rows, nn.functional.cross_entropy)


class Transposed(nn.Module):
    """A parameter whose strides its forward relies on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(48.0).view(8, 6).t() / 50)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(x @ self.weight.t().view(48).view(8, 6).t()))


class Biased(nn.Module):
    """Attention with a mask that learns, as T5's places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.bias = nn.Parameter(torch.arange(4.0).view(2, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).view(-1, 1, 2, 4)
        return self.last(nn.functional.scaled_dot_product_attention(h, h, h, self.bias[None]).flatten(1))


class Extra(nn.Linear):
    """Has state that is no tensor of its state_dict, as quantised modules have."""

    def get_extra_state(self) -> Any:
        return {"format": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def with_extra() -> nn.Module:
    return nn.Sequential(Extra(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("build", [Blocks, sequential, Transposed, Biased, with_extra])
def test_a_file_and_the_whole_model_train_alike(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    case = plain_case(build)
    state = {name: x.contiguous() for name, x in build().state_dict().items() if isinstance(x, torch.Tensor)}
    save_file(state | {"2._extra_state": torch.zeros(3)}, tmp_path / "a.safetensors")
    given = {"init_from": tmp_path / "a.safetensors", "partitioner": "prefix_sum"}
    whole, parts = (trained(case, tmp_path, on, weights_on=on, **given) for on in ("client", "workers"))
    assert whole[1] == parts[1]
    assert_same(whole[0], parts[0])


def test_a_run_may_move_between_client_and_workers(tmp_path: Path) -> None:
    case = plain_case(sequential)
    save_file(sequential().state_dict(), tmp_path / "a.safetensors")
    given = {"init_from": tmp_path / "a.safetensors"}
    trained(case, tmp_path, "run", weights_on="client", **given)
    moved = trainer(case, tmp_path, weights_on="workers", **given).fit(num_steps=4, local=True, progress=False)
    assert [record.step for record in moved.records][-2:] == [2, 3]
    save_file(sequential().state_dict(), tmp_path / "a.safetensors")  # drawn anew
    trained(case, tmp_path, "other", weights_on="workers", init_from=tmp_path / "a.safetensors")
    save_file(sequential().state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="init_from: another content"):
        trainer(case, tmp_path, "other", weights_on="workers", **given).fit(num_steps=4, local=True, progress=False)


def test_what_a_loss_averages_over_is_found_without_weights(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(3)
    targets = torch.tensor([0, -100, 2, -100, -100, 1, 0, 2])
    data = torch.utils.data.TensorDataset(torch.randn(8, 6, generator=drawn), targets)
    for build in (Blocks, sequential):
        case = Case("ignoring", build, lambda count: data, nn.functional.cross_entropy)
        found = [
            trainer(case, tmp_path, weights_on=on)._prepared().settings.loss_reduction for on in ("client", "workers")
        ]
        assert "labels other" in found[0].words
        assert found[0].words == found[1].words


def changed(state: dict[str, torch.Tensor], **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    found = {**state, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"first__bias": None}, r"1 missing there: 'first\.bias'"),
        ({"third__bias": torch.zeros(2)}, r"1 not in the model: 'third\.bias'"),
        ({"scale": torch.zeros(3)}, r"1 of another shape or kind: 'scale' \(float32 \[3\] there, float32 \[8\]"),
        ({"scale": torch.zeros(8, dtype=torch.int64)}, r"'scale' \(int64 \[8\] there, float32 \[8\] in the model"),
    ],
)
def test_names_shapes_and_kinds_that_differ_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], words: str
) -> None:
    save_file(changed(Blocks().state_dict(), **tensors), tmp_path / "a.safetensors")
    made = trainer(plain_case(Blocks), tmp_path, init_from=tmp_path / "a.safetensors", weights_on="workers")
    with pytest.raises(ConfigError, match=words):
        made.plan()


def test_an_index_that_names_another_file_is_refused(tmp_path: Path) -> None:
    weights = shards(hugging_face("gpt2"), tmp_path)
    first, second = sorted(weights.glob("*.safetensors"))[:2]
    moved = next(iter(load_file(first)))
    state = load_file(first)
    tensor = state.pop(moved)
    save_file(state, first, {"format": "pt"})
    save_file({**load_file(second), moved: tensor}, second, {"format": "pt"})
    made = trainer(hugging_face("gpt2"), tmp_path, init_from=weights, weights_on="workers")
    with pytest.raises(ConfigError, match=f"lists '{moved}' in {first.name}, but it is not there"):
        made.plan()


def test_who_cannot_be_filled_by_workers_is_refused(tmp_path: Path) -> None:
    data, loss = rows(8), nn.functional.cross_entropy
    pipeline = raypipe.PipelineConfig(num_stages=2, minibatch_size=4, weights_on="workers")
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="weights_on='workers' needs a model that has no weights here"):
        raypipe.PipelineTrainer(Blocks(), optimizer=optimizer, loss_fn=loss, train_data=data, pipeline=pipeline)
    torch.save(Blocks().state_dict(), tmp_path / "a.pt")
    made = trainer(plain_case(Blocks), tmp_path, init_from=tmp_path / "a.pt", weights_on="workers")
    with pytest.raises(ConfigError, match=r"cannot be read tensor by tensor.*save_file"):
        made.plan()


def test_a_buffer_that_is_nowhere_is_named(tmp_path: Path) -> None:
    save_file(Blocks().state_dict(), tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = Blocks()
    made = trainer(plain_case(lambda: model), tmp_path, init_from=tmp_path / "a.safetensors", weights_on="workers")
    made._weights.model = model  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"the buffer 'shift' is on the meta device and in no file.*lambda"):
        made.plan()
