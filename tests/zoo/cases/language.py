"""Language models of transformers with their own losses, from tiny configurations; labels padded with -100."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo.cases.losses import OVER_THE_BATCH
from tests.zoo.row import EQUAL, Refused, Rounding, Row, Verdict
from tests.zoo.samples import WORDS, sentences, translations

__all__ = ["ROWS", "made"]

TIED = Rounding(
    "a weight with several uses; a pipeline sums each use over the micro-batches first, and then over the uses"
)


SHARED = Rounding("a table of positions that every layer reads; each use is summed over the micro-batches first")


def made(name: str, **more: Any) -> Callable[[], nn.Module]:
    """A class of transformers with its configuration, ``Class(Config(**more))``."""

    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        found = getattr(transformers, name)
        return found(found.config_class(**more))

    return build


_TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DEEP = {
    **_TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
"""As most configurations of transformers call it."""
_TWICE = {**_DEEP, "num_hidden_layers": 2}
_GPT2 = {
    **_TOKENS, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
_OLD = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def experts(name: str, factor: float, **more: Any) -> Callable[[], nn.Module]:
    """Two layers of four experts, and a loss of balance with this factor."""
    return made(
        name, **_TWICE, **more, num_key_value_heads=1, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=factor,
    )  # fmt: skip


padded = partial(sentences, padded=True)
masked = partial(sentences, padded=True, mask=True)


def lora() -> nn.Module:
    """Llama with frozen weights and adapters of rank 2, as peft makes them."""
    from peft import LoraConfig, get_peft_model

    llama = made("LlamaForCausalLM", **_DEEP, num_key_value_heads=1)()
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(llama, config)


def next_sentences(count: int) -> Any:
    """For BERT's two heads: which sentence follows, beside the masked words."""
    return sentences(count, padded=True, mask=True, next_sentence_label=lambda row: torch.tensor(row % 2))


def topics(count: int) -> Any:
    """A class for each sentence, in place of its labels."""
    rows = sentences(count, padded=True, mask=True)
    for at, item in enumerate(rows.items):
        item["labels"] = torch.tensor(at % 3)
    return rows


def spans(count: int) -> Any:
    """The first and the last token of an answer."""
    rows = sentences(count, padded=True, mask=True)
    for at, item in enumerate(rows.items):
        del item["labels"]
        item["start_positions"], item["end_positions"] = torch.tensor(at % 3), torch.tensor(3 + at % 5)
    return rows


def masked_translations(count: int) -> Any:
    rows = translations(count)
    for item in rows.items:
        item["attention_mask"] = torch.ones(7, dtype=torch.long)
    return rows


row = partial(Row, "language models")


def own(
    model: str, build: Callable[[], nn.Module], data: Any, words: str, verdict: Verdict = EQUAL, **more: Any
) -> Row:
    return row(model, build, data, None, "its own", words, verdict, **more)


ROWS = (
    own("Mixtral, router_aux_loss_coef=0.001", experts("MixtralForCausalLM", 0.001, num_local_experts=4), padded,
        "sentences, labels padded by -100", OVER_THE_BATCH, microbatches=(4,), evaluated=8),
    own("Qwen2-MoE, router_aux_loss_coef=0.1", experts("Qwen2MoeForCausalLM", 0.1, num_experts=4), padded,
        "sentences, labels padded by -100", OVER_THE_BATCH, microbatches=(4,), evaluated=8),
    own("Mixtral, loss_reduction='per_microbatch'", experts("MixtralForCausalLM", 0.1, num_local_experts=4), padded,
        "sentences, labels padded by -100", note="the balance of experts is per micro-batch", by_word=True),
    own("GPT-2, tied", made("GPT2LMHeadModel", **_GPT2), padded, "sentences, labels padded by -100", TIED, stages=3),
    own("GPT-2, untied", made("GPT2LMHeadModel", **_GPT2, tie_word_embeddings=False), padded,
        "sentences, labels padded by -100", stages=3),
    own("Llama", made("LlamaForCausalLM", **_TWICE, num_key_value_heads=1, attention_dropout=0.1), padded,
        "sentences, labels padded by -100", stages=3),
    own("Llama, no dropout", made("LlamaForCausalLM", **_DEEP, num_key_value_heads=1), masked,
        "sentences, attention masks, -100"),
    own("Llama with LoRA (peft)", lora, padded, "sentences, labels padded by -100", needs="peft"),
    own("Mistral, sliding window", made("MistralForCausalLM", **_DEEP, num_key_value_heads=1, sliding_window=4), padded,
        "sentences, labels padded by -100"),
    own("Qwen2-MoE", made("Qwen2MoeForCausalLM", **_DEEP, num_key_value_heads=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, num_experts=4, num_experts_per_tok=2), padded,
        "sentences, labels padded by -100"),
    own("Gemma 2", made("Gemma2ForCausalLM", **_DEEP, num_key_value_heads=1, head_dim=8), padded,
        "sentences, labels padded by -100", TIED),
    own("Phi", made("PhiForCausalLM", **_DEEP, resid_pdrop=0.1), padded, "sentences, labels padded by -100"),
    own("OPT", made("OPTForCausalLM", **_TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=24,
        max_position_embeddings=16, word_embed_proj_dim=16, dropout=0.1), padded, "sentences, labels padded by -100",
        TIED),
    own("Bloom", made("BloomForCausalLM", **_TOKENS, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.1), padded,
        "sentences, labels padded by -100", TIED),
    own("GPT-NeoX", made("GPTNeoXForCausalLM", **_DEEP, hidden_dropout=0.1), padded,
        "sentences, labels padded by -100"),
    own("Mamba", made("MambaForCausalLM", **_TOKENS, hidden_size=16, num_hidden_layers=1, state_size=4,
        use_mambapy=False), padded, "sentences, labels padded by -100", TIED),
    own("BERT (MLM), tied", made("BertForMaskedLM", **_DEEP, **_OLD), masked, "sentences, attention masks, -100", TIED),
    own("BERT (MLM), no dropout", made("BertForMaskedLM", **_DEEP, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, tie_word_embeddings=False), masked, "sentences, attention masks, -100"),
    own("BERT, words and next sentence", made("BertForPreTraining", **_DEEP, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, tie_word_embeddings=False), next_sentences, "sentences, two labels, -100",
        Rounding("each of the two terms has weights of its own, so it is compared with whole mini-batches", 1e-4),
        whole=True),
    own("RoBERTa", made("RobertaForMaskedLM", **{**_DEEP, "max_position_embeddings": 20}, **_OLD,
        tie_word_embeddings=False), masked, "sentences, attention masks, -100"),
    own("DistilBERT", made("DistilBertForSequenceClassification", **_TOKENS, dim=16, n_layers=1, n_heads=2,
        hidden_dim=24, max_position_embeddings=16, num_labels=3, problem_type="single_label_classification"), topics,
        "sentences, a class each"),
    own("ALBERT, one layer used twice", made("AlbertForMaskedLM", **_TWICE, embedding_size=8, hidden_dropout_prob=0.1),
        masked, "sentences, attention masks, -100", TIED),
    own("ELECTRA", made("ElectraForQuestionAnswering", **_DEEP, **_OLD, embedding_size=8), spans,
        "sentences, spans of answers"),
    own("DeBERTa-v2", made("DebertaV2ForTokenClassification", **_TWICE, **_OLD, relative_attention=True,
        pos_att_type=["p2c", "c2p"], num_labels=WORDS, position_buckets=4), masked, "sentences, attention masks, -100",
        SHARED),
    own("T5", made("T5ForConditionalGeneration", vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1,
        num_decoder_layers=1, num_heads=2, use_cache=False, decoder_start_token_id=0, pad_token_id=0), translations,
        "translations, -100", TIED),
    own("Bart", made("BartForConditionalGeneration", **_TOKENS, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_position_embeddings=16, use_cache=False, decoder_start_token_id=2), translations, "translations, -100",
        TIED),
    own("Switch", made("SwitchTransformersForConditionalGeneration", vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24,
        num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=2, use_cache=False, decoder_start_token_id=0,
        pad_token_id=0, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
        masked_translations, "translations, masks, -100", Refused(
            "SwitchTransformersForConditionalGeneration decides by values of its data or buffers at {line}, in "
            "forward, \"for expert_idx in expert_hit:\". A graph of stages has one way only, and this branch is in a "
            "library: switch it off if a setting does (as layerdrop=0.0 of transformers), assign a function of yours "
            "that always goes the way of your data to SwitchTransformersExperts.forward of "
            "transformers.models.switch_transformers.modeling_switch_transformers, or build the model as an "
            "nn.Sequential of blocks, which are not traced.",
            "it runs the experts that the data choose")),
)  # fmt: skip
"""From transformers and peft."""
