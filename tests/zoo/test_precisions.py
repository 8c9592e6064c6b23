"""Models of transformers in 16 bits equal plain PyTorch doing the same, to the bit, with recomputation too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.data.open_data import open_data
from tests.exactness import Recorder
from tests.runs.plain_precision import train_plain
from tests.runs.test_precision import differences
from tests.zoo.cases.attention import pictures
from tests.zoo.cases.language import made
from tests.zoo.samples import NUM_CLASSES, WORDS, sentences

pytestmark = pytest.mark.slow

STEPS, SAMPLES, MINIBATCH, SIZE, NORM = 3, 12, 4, 2, 0.5
_DEEP = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_WORDS = {**_DEEP, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
          "max_position_embeddings": 16}  # fmt: skip


# Rotary angles (Llama, Mixtral) are computed where the model switches autocast off. Its other attention leaves the mask
# out where it is not traced, and rounds otherwise.
_ROTARY = {**_WORDS, "num_key_value_heads": 1, "attn_implementation": "eager"}
MODELS = {
    "Llama": (made("LlamaForCausalLM", **_ROTARY), sentences),
    "Mixtral": (made("MixtralForCausalLM", **_ROTARY, num_local_experts=4), sentences),
    "BERT": (made("BertForMaskedLM", **_WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                  tie_word_embeddings=False), partial(sentences, mask=True)),
    "ViT": (made("ViTForImageClassification", **_DEEP, image_size=8, patch_size=4, num_labels=NUM_CLASSES), pictures),
}  # fmt: skip


def adapters() -> torch.nn.Module:
    """Of fp32 on a frozen model of bf16; its forward takes all columns as ``**kwargs``, for no task was named."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    return get_peft_model(MODELS["Llama"][0]().bfloat16(), config)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


@pytest.mark.parametrize(
    ("name", "precision", "fields"),
    [
        ("Llama", "bf16", {"recompute": "always"}),
        ("Llama", "bf16-autocast", {"schedule": "zb-h1"}),
        ("Llama", "fp16", {"schedule": "zb-h1", "recompute": "always"}),
        ("Mixtral", "bf16-autocast", {"recompute": "always"}),
        ("BERT", "fp16", {}),
        ("ViT", "bf16", {}),
        ("adapters", "fp32", {}),
    ],
)
def test_equal_to_plain_pytorch(name: str, precision: str, fields: dict[str, Any], tmp_path: Path) -> None:
    if name == "adapters":
        pytest.importorskip("peft")
    build, samples = MODELS.get(name, (adapters, sentences))
    torch.manual_seed(1)
    model, data = build(), samples(SAMPLES)
    source = open_data(data, seed=0)
    steps = [
        [source.read(0, step * MINIBATCH + at, SIZE, source.columns) for at in range(0, MINIBATCH, SIZE)]
        for step in range(STEPS)
    ]
    plain = train_plain(model, None, steps, adamw, precision, NORM)  # type: ignore[arg-type]
    recorder = Recorder(torch.optim.AdamW, lr=1e-2)
    trainer = PipelineTrainer(
        model, optimizer=recorder, train_data=data,
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=MINIBATCH, num_microbatches=MINIBATCH // SIZE, partitioner="parameters",
            max_grad_norm=NORM, precision=precision, **fields,
        ),
        run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
    )  # fmt: skip
    result = trainer.fit(num_steps=STEPS, local=True, progress=False)
    assert differences(result, recorder, plain, tmp_path) == []
