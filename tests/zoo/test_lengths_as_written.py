"""Mini-batches padded to their longest item by transformers' own collators train models as plain PyTorch does.

Tokens are not made from text: only the shapes matter here. tests/runs/test_changing_sizes.py has smaller cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
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
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(num_labels=3, vocab_size=WORDS, **USUAL))


def deberta() -> nn.Module:
    more = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
    return hf.DebertaV2ForTokenClassification(hf.DebertaV2Config(num_labels=3, vocab_size=WORDS, **USUAL, **more))


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=128, **IDS))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**IDS, **USUAL))


def t5() -> nn.Module:
    small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**IDS, **small))


def marian() -> nn.Module:
    return hf.MarianMTModel(hf.MarianConfig(max_position_embeddings=128, **IDS, **LAYERS, **HEADS, **WIDTHS))


def whisper() -> nn.Module:
    sizes = {"num_mel_bins": 80, "max_source_positions": 10, "max_target_positions": 128}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **IDS, **LAYERS, **HEADS, **WIDTHS))


def speech(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate as the usual data collator of speech-to-text scripts does: pad the labels, then put -100 there."""
    padded = tokenizer().pad([{"input_ids": item["labels"]} for item in items], return_tensors="pt")
    labels = padded["input_ids"].masked_fill(padded["attention_mask"].ne(1), -100)
    return {"input_features": torch.tensor([item["input_features"] for item in items]), "labels": labels}


def rows(kind: str) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(4)

    def ids(most: int) -> list[int]:
        length = int(torch.randint(5, most, (), generator=drawn))
        return torch.randint(3, WORDS, (length,), generator=drawn).tolist()

    made = []
    for _ in range(96):
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
    return made


CASES: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any], Any]]] = {
    "bert": (bert, "class", hf.DataCollatorWithPadding),
    "deberta": (deberta, "each", hf.DataCollatorForTokenClassification),
    "gpt2": (gpt2, "tokens", partial(hf.DataCollatorForLanguageModeling, mlm=False)),
    "llama": (llama, "tokens", partial(hf.DataCollatorForLanguageModeling, mlm=False)),
    "t5": (t5, "answer", lambda words: hf.DataCollatorForSeq2Seq(words, model=t5())),
    "marian": (marian, "answer", lambda words: hf.DataCollatorForSeq2Seq(words, model=marian())),
    "whisper": (whisper, "speech", lambda words: speech),
}
REUSED = ("gpt2", "t5", "marian", "whisper", "deberta")
"""Models that use a parameter several times, whose gradients are added up in another order (docs/design/0002)."""


@pytest.mark.parametrize("name", CASES)
def test_lengths_that_change_with_every_mini_batch(name: str, tmp_path: Path) -> None:
    make, kind, collator = CASES[name]
    data = DataLoader(rows(kind), batch_size=8, shuffle=True, collate_fn=collator(tokenizer()))  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = make().train()
    config = {"num_stages": STAGES.get(name, 2), "num_microbatches": 4, "max_grad_norm": 1.0}
    given: dict[str, Any] = {"optimizer": sgd_of_streams, "train_data": data}
    made = trainer_of(model, tmp_path, loss_fn=None, minibatch_size="auto", **config, **given)
    run = made.fit(num_steps=STEPS, local=True, progress=False)
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
