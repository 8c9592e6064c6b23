"""Mini-batches of changing sizes, as collate functions that pad to the longest item make them, are trained exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from raypipe import load_state_dict
from raypipe.errors import ConfigError
from raypipe.prepare.data_sizes import MOST_LOOKED_AT, look_at
from raypipe.testing import reference
from tests.exactness import same_bits
from tests.runs.test_given_data import config_of, sgd_of_streams, trainer_of_streams

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

FILL = {"labels": -100, "attention_mask": 0}


def padded(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As DataCollatorWithPadding and DataCollatorForSeq2Seq: to the longest list of the mini-batch."""
    made = {}
    for name in items[0]:
        values = [item[name] for item in items]
        if isinstance(values[0], list):
            most = max(map(len, values))
            values = [value + [FILL.get(name, 0)] * (most - len(value)) for value in values]
        made[name] = torch.tensor(values)
    return made


def sentences(count: int, *, least: int = 5, labels: str = "tokens") -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(count):
        length, other = (int(n) for n in torch.randint(least, 15, (2,), generator=drawn))
        ids, answer = (torch.randint(3, 32, (n,), generator=drawn).tolist() for n in (length, other))
        target = {"tokens": ids, "answer": answer, "class": ids[0] % 3}[labels]
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "labels": target})
    return rows


def language_model(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as hf

        torch.manual_seed(0)
        usual = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        sizes: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
        match name:
            case "bert":
                return hf.BertForSequenceClassification(hf.BertConfig(num_labels=3, vocab_size=32, **usual)).train()
            case "llama":
                return hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **sizes, **usual)).train()
            case "gpt2":
                small = hf.GPT2Config(
                    n_layer=2, n_head=2, n_embd=16, n_positions=32, use_cache=False, tie_word_embeddings=False, **sizes
                )
                return hf.GPT2LMHeadModel(small).train()
            case "t5":
                small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "use_cache": False}
                return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes, **small)).train()
        raise AssertionError(name)

    return make


def trained_alike(folder: Path, make: Callable[[], nn.Module], data: Any, steps: int, **more: Any) -> None:
    """Train on stages and in plain PyTorch; losses and parameters have the same bits.

    Uses of T5's shared embedding are added in another order (docs/design/0002), so its last digits may differ.
    """
    config = {"loss_reduction": "auto", "max_grad_norm": 1.0}
    run = trainer_of_streams(folder, "run", data, config, make(), **more).fit(
        num_steps=steps, local=True, progress=False
    )
    plain = reference(
        make(), optimizer=sgd_of_streams, train_data=data, num_steps=steps, pipeline=config_of(**config), **more
    )
    kept = load_state_dict(run.checkpoint)
    if "shared.weight" in kept:
        torch.testing.assert_close(kept, {**kept, **plain.parameters}, rtol=0.0, atol=1e-6)
        return
    assert [record.loss for record in run.records] == list(plain.losses)
    assert [name for name, value in plain.parameters.items() if not same_bits(kept[name], value)] == []


@pytest.mark.parametrize(
    ("name", "labels"), [("bert", "class"), ("gpt2", "tokens"), ("llama", "tokens"), ("t5", "answer")]
)
def test_dynamic_padding_is_exact(name: str, labels: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    data = DataLoader(sentences(64, labels=labels), batch_size=8, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    trained_alike(tmp_path, language_model(name), data, 8, loss_fn=None)


def of_several_sizes(items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    drawn, side = torch.Generator().manual_seed(sum(items)), 6 + sum(items) % 5
    return torch.randn(len(items), 3, side, side + 1, generator=drawn), torch.tensor(items) % 3


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.two(torch.relu(self.one(x)))).mean((2, 3)))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions()


def test_images_of_several_sizes_are_exact(tmp_path: Path) -> None:
    data = DataLoader(range(48), batch_size=8, shuffle=True, collate_fn=of_several_sizes)  # type: ignore[arg-type]
    trained_alike(tmp_path, convolutions, data, 6, loss_fn=functional.cross_entropy)


def next_tokens(items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    drawn, length = torch.Generator().manual_seed(sum(items)), 6 + sum(items) % 7
    ids = torch.randint(0, 32, (len(items), length), generator=drawn)
    return ids[:, :-1], ids[:, 1:]


def by_token(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids.reshape(-1)).unflatten(0, ids.shape)
        return self.head(torch.tanh(self.cell(x.cumsum(1))))


def cumulative() -> nn.Module:
    torch.manual_seed(0)
    return Cumulative()


def test_slices_of_padded_tokens_are_exact(tmp_path: Path) -> None:
    data = DataLoader(range(48), batch_size=8, shuffle=True, collate_fn=next_tokens)  # type: ignore[arg-type]
    trained_alike(tmp_path, cumulative, data, 6, loss_fn=by_token)


class Branching(nn.Module):
    """Model with a branch on the length of its input, or with the length as a number."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head, self.way = nn.Embedding(32, 8), nn.Linear(8, 3), way

    def extra_repr(self) -> str:
        return self.way

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.way == "branch" and ids.shape[1] > 12:
            x = x * 2
        return self.head(x / int(ids.shape[1]) if self.way == "number" else x).mean(1)


def ids_and_class(items: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    made = padded(items)
    return made["input_ids"], made["labels"]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            "branch",
            r"train_data, mini-batch from sample \d+ on: .*came with 0.shape\[1\] = \d+, but forward branches on",
        ),
        ("number", r"train_data, .*came with shape \(8, \d+\), but .*traced for \(samples, \d+\).*One shape is needed"),
    ],
)
def test_a_model_that_takes_not_all_sizes_of_its_data_is_refused(way: str, message: str, tmp_path: Path) -> None:
    rows = sentences(64, labels="class")
    data = DataLoader(sorted(rows, key=lambda row: len(row["input_ids"])), batch_size=8, collate_fn=ids_and_class)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        trainer_of_streams(tmp_path, "run", data, {}, Branching(way)).plan()


class Source:
    """Source whose mini-batches have a length that grows with their offset."""

    num_samples, columns = 400, ("x",)

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def read(self, epoch: int, start: int, count: int, columns: Any) -> Mapping[str, torch.Tensor]:
        self.offsets.append(start)
        return {"x": torch.zeros(count, 1 + start)}


def test_the_mini_batches_that_are_looked_at_are_spread_over_the_epoch() -> None:
    source = Source()
    sizes = look_at(source, ("x",), 8)  # type: ignore[arg-type]
    assert source.offsets == [48 * i for i in range(MOST_LOOKED_AT)]
    assert sizes.varying == {("x", 1)}
    assert (sizes.smallest, sizes.largest) == (0, 336)
    assert sizes.rows(source, ("x",), 2, sizes.largest)["x"].shape == (2, 337)  # type: ignore[arg-type]
    assert "size 1 of 'x' from 1 to 337, in 8 of them" in sizes.note()
