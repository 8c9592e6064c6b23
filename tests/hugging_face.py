"""GPT-2 and Llama from small configurations, without a download; both make their own loss of a dict batch."""

from __future__ import annotations

from functools import partial

import torch
import transformers
from torch import nn

from tests.models import Case, Records

__all__ = ["NAMES", "hugging_face"]

NAMES = ("gpt2", "gpt2-untied", "llama")


def _sentences(count: int) -> Records:
    drawn = torch.Generator().manual_seed(6)
    rows = torch.randint(0, 32, (count, 8), generator=drawn)
    return Records([{"input_ids": row, "labels": row.clone()} for row in rows])


def _gpt2(tied: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0,
        tie_word_embeddings=tied, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16, intermediate_size=24,
        vocab_size=32, max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hugging_face(name: str) -> Case:
    """A case by name."""
    transformers.logging.set_verbosity_error()
    builds = {"gpt2": partial(_gpt2, True), "gpt2-untied": partial(_gpt2, False), "llama": _llama}
    return Case(name, builds[name], _sentences, None, tied=name == "gpt2")
