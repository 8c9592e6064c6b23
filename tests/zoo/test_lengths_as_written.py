"""Mini-batches of changing lengths and image sizes, made as scripts make them, train models as plain PyTorch does.

Collators are those of transformers where it has one. Tokens are not made from text: only the shapes matter here.
tests/runs/test_changing_sizes.py has smaller cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from raypipe import PipelineConfig, load_state_dict
from raypipe.testing import reference
from tests.exactness import same_bits
from tests.runs.test_given_data import sgd_of_streams
from tests.trainers import trainer_of

hf = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.usefixtures("captures_of_a_test")]

WORDS, STEPS, STAGES = 64, 24, {"bert": 3}
IDS: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1, "d_model": 16}
HEADS: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
WIDTHS: dict[str, Any] = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
USUAL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def tokenizer() -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w3"))
    named = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "mask_token": "w4"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, **named)


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(num_labels=3, vocab_size=WORDS, **USUAL))


def masked_bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, **USUAL))


def deberta() -> nn.Module:
    more = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    return hf.DebertaV2ForTokenClassification(hf.DebertaV2Config(num_labels=3, vocab_size=WORDS, **USUAL, **more))


def distilbert() -> nn.Module:
    sizes = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 128}
    return hf.DistilBertForTokenClassification(hf.DistilBertConfig(num_labels=3, vocab_size=WORDS, **sizes))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=128, **IDS))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**IDS, **USUAL))


def t5() -> nn.Module:
    small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**IDS, **small))


def marian() -> nn.Module:
    return hf.MarianMTModel(hf.MarianConfig(max_position_embeddings=128, **IDS, **LAYERS, **HEADS, **WIDTHS))


def bart() -> nn.Module:
    sizes = {"max_position_embeddings": 128, **IDS, **LAYERS, **HEADS, **WIDTHS}
    return hf.BartForConditionalGeneration(hf.BartConfig(**sizes))


def whisper() -> nn.Module:
    sizes = {"num_mel_bins": 80, "max_source_positions": 10, "max_target_positions": 128}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **IDS, **LAYERS, **HEADS, **WIDTHS))


class Block(nn.Module):
    """Attention with rotary positions, and an MLP, as in scripts that train a GPT of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.view(samples, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = turned(q, angles) @ turned(k, angles).transpose(-2, -1) / math.sqrt(width // self.heads)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.between(x))


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()


class Decoder(nn.Module):
    """Makes the causal mask and the rotary angles from the length of its input."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(width, heads) for _ in range(3)), nn.RMSNorm(width)
        self.register_buffer("speeds", 1e4 ** (-torch.arange(0, width // heads, 2) / (width // heads)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length, x = ids.shape[1], self.words(ids)
        angles = torch.outer(torch.arange(length, device=x.device), self.speeds).repeat(1, 2)
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        for block in self.blocks:
            x = block(x, mask, angles)
        return self.head(self.norm(x))


class Tagger(nn.Module):
    """Tags every word of padded sentences."""

    def __init__(self, kind: type[nn.LSTM]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16, padding_idx=0), nn.Linear(24, 3)
        self.layers = kind(16, 12, 2, batch_first=True, bidirectional=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(ids))[0])


class Sounds(nn.Module):
    """Classifies padded mel frames: convolutions, a GRU, and the mean over the frames of each sound."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(width, 16, 3, stride=2, padding=1) for width in (20, 16))
        self.layers, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(frames.transpose(1, 2)))))
        x = self.layers(x.transpose(1, 2))[0]
        kept = torch.arange(x.shape[1], device=x.device) < (lengths[:, None] + 3) // 4
        return self.head((x * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


class Segmenter(nn.Module):
    """Classifies every pixel of padded images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(self.layers(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


class Pooling(nn.Module):
    """Classifies images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def speech(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate as the usual data collator of speech-to-text scripts does: pad the labels, then put -100 there."""
    padded = tokenizer().pad([{"input_ids": item["labels"]} for item in items], return_tensors="pt")
    labels = padded["input_ids"].masked_fill(padded["attention_mask"].ne(1), -100)
    return {"input_features": torch.tensor([item["input_features"] for item in items]), "labels": labels}


def tagged(items: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = ([torch.tensor(item[name]) for item in items] for name in ("input_ids", "labels"))
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


def next_words(items: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, _ = tagged([item | {"labels": []} for item in items])
    return ids[:, :-1], ids[:, 1:].where(ids[:, 1:] != 0, -100)


def of_sounds(items: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    frames, kinds = zip(*items, strict=True)
    return pad_sequence(list(frames), batch_first=True), torch.tensor([len(x) for x in frames]), torch.tensor(kinds)


def padded_images(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    height, width = (max(mask.shape[at] for _, mask in items) for at in (0, 1))

    def to_size(x: torch.Tensor, value: int) -> torch.Tensor:
        return functional.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]), value=value)

    return torch.stack([to_size(x, 0) for x, _ in items]), torch.stack([to_size(mask, 255) for _, mask in items])


def by_word(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def by_pixel(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores, labels, ignore_index=255)


def rows(kind: str) -> list[Any]:
    drawn = torch.Generator().manual_seed(4)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most, (), generator=drawn))

    def ids(most: int) -> list[int]:
        return torch.randint(3, WORDS, (number(5, most),), generator=drawn).tolist()

    def image(height: int, width: int) -> torch.Tensor:
        return torch.randn(3, height, width, generator=drawn)

    made: list[Any] = []
    for at in range(96):
        tokens, answer = ids(128), ids(60)
        masked = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
        labels: dict[str, Any] = {
            "class": {"labels": tokens[0] % 3},
            "each": {"labels": [token % 3 for token in tokens]},
            "answer": {"labels": answer},
        }.get(kind, {})
        made.append({**masked, **labels})
        if kind == "speech":
            made[-1] = {"input_features": torch.randn(80, 20, generator=drawn).tolist(), "labels": answer}
        elif kind == "sounds":
            made[-1] = torch.randn(len(tokens), 20, generator=drawn), number(0, 3)
        elif kind == "masks":
            height, width = number(9, 40), number(9, 40)
            made[-1] = image(height, width), torch.randint(0, 4, (height, width), generator=drawn)
        elif kind == "buckets":
            made[-1] = image(16 + 8 * (at // 8 % 4), 24), number(0, 3)
    return made


class Case(NamedTuple):
    """Case of a model.

    Attributes:
        make: builds the model.
        data: kind of ``rows``.
        collate: (tokenizer) -> collate function of the DataLoader; it returns None for rows that are only stacked.
        loss: loss_fn; None if the model returns its loss.
    """

    make: Callable[[], nn.Module]
    data: str
    collate: Callable[[Any], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None


CASES = {
    "bert": Case(bert, "class", hf.DataCollatorWithPadding),
    "bert-mlm": Case(masked_bert, "tokens", hf.DataCollatorForLanguageModeling),
    "deberta": Case(deberta, "each", hf.DataCollatorForTokenClassification),
    "distilbert": Case(distilbert, "each", hf.DataCollatorForTokenClassification),
    "gpt2": Case(gpt2, "tokens", partial(hf.DataCollatorForLanguageModeling, mlm=False)),
    "llama": Case(llama, "tokens", partial(hf.DataCollatorForLanguageModeling, mlm=False)),
    "t5": Case(t5, "answer", lambda words: hf.DataCollatorForSeq2Seq(words, model=t5())),
    "marian": Case(marian, "answer", lambda words: hf.DataCollatorForSeq2Seq(words, model=marian())),
    "bart": Case(bart, "answer", hf.DataCollatorForSeq2Seq),
    "whisper": Case(whisper, "speech", lambda words: speech),
    "own-decoder": Case(Decoder, "tokens", lambda words: next_words, by_word),
    "lstm": Case(partial(Tagger, nn.LSTM), "each", lambda words: tagged, by_word),
    "sounds": Case(Sounds, "sounds", lambda words: of_sounds, functional.cross_entropy),
    "padded-images": Case(Segmenter, "masks", lambda words: padded_images, by_pixel),
    "images-in-buckets": Case(Pooling, "buckets", lambda words: None, functional.cross_entropy),
}
REUSED = ("gpt2", "t5", "marian", "bart", "whisper", "deberta", "bert-mlm")
"""Models that use a parameter several times, whose gradients are added up in another order (docs/design/0002)."""


@pytest.mark.parametrize("name", CASES)
def test_lengths_that_change_with_every_mini_batch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    order = {"batch_size": 8, "shuffle": case.data != "buckets", "collate_fn": case.collate(tokenizer())}
    data = DataLoader(rows(case.data), **order)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = case.make().train()
    config = {"num_stages": STAGES.get(name, 2), "num_microbatches": 4, "max_grad_norm": 1.0}
    given: dict[str, Any] = {"optimizer": sgd_of_streams, "train_data": data, "loss_fn": case.loss}
    run = trainer_of(model, tmp_path, minibatch_size="auto", **config, **given).fit(
        num_steps=STEPS, local=True, progress=False
    )
    plain = reference(model, num_steps=STEPS, pipeline=PipelineConfig(**config), **given)
    kept = load_state_dict(run.checkpoint)
    if name in REUSED:
        assert [record.loss for record in run.records] == pytest.approx(plain.losses, rel=1e-5)
        assert [record.grad_norm for record in run.records] == pytest.approx(plain.grad_norms, rel=1e-4)
        torch.testing.assert_close({key: kept[key] for key in plain.parameters}, plain.parameters, rtol=0.0, atol=1e-5)
        return
    assert [record.loss for record in run.records] == list(plain.losses)
    assert [record.grad_norm for record in run.records] == list(plain.grad_norms)
    assert [key for key, value in plain.parameters.items() if not same_bits(kept[key], value)] == []
