"""Compare scripts for transformers.Trainer with the same scripts in a pipeline: one row of a table for each task.

    python jobs/train/trainer_scripts.py                     all tasks
    python jobs/train/trainer_scripts.py --only glue clip    some of them
    python jobs/train/trainer_scripts.py --ray               on Ray instead of in threads

The tasks are those of transformers' examples, with small models with random weights and generated data. Each is trained
twice from the same weights: by the class that the script names, and by its pipelined one with two stages. A row of the
table has the outcome, the largest differences of logged losses and of parameters, and the CPU seconds of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import raypipe
from raypipe.errors import RaypipeError

WORDS, CLASSES, LONGEST = 48, 3, 16
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
DECODER = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TRANSLATION = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
    "dropout": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1,
}  # fmt: skip
SPEECH = {
    "vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "activation_dropout": 0.0,
    "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "apply_spec_augment": False, "classifier_proj_size": 16, "num_labels": CLASSES, "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Script:
    """A script: its model and data, and what it changes in Trainer.

    Attributes:
        model: makes the model.
        rows: items of the dataset.
        collate: data_collator; None pads texts.
        own: (class of trainer) -> the script's subclass.
        generates: True for a script for Seq2SeqTrainer.
        more: further fields of TrainingArguments.
    """

    model: Callable[[], torch.nn.Module]
    rows: list[dict[str, Any]]
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    own: Callable[[Any], Any] = lambda kind: kind
    generates: bool = False
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad lists to the longest one of the batch: labels with -100, others with 0."""
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], list):
            longest = max(map(len, values))
            values = [value + [-100 if name == "labels" else 0] * (longest - len(value)) for value in values]
        is_tensor = isinstance(values[0], torch.Tensor)
        batch[name] = torch.stack(values) if is_tensor else torch.tensor(values)
    return batch


def texts(target: Callable[[list[int], int], dict[str, Any]], least: int = 8) -> list[dict[str, Any]]:
    """Generate texts of ``least`` to 16 words; ``target`` maps (words, row) to the columns of the answer."""
    drawn = torch.Generator().manual_seed(1)
    rows = []
    for row in range(24):
        length = int(torch.randint(least, LONGEST + 1, (1,), generator=drawn))
        words = torch.randint(4, WORDS, (length,), generator=drawn).tolist()
        rows.append({"input_ids": words, "attention_mask": [1] * length, **target(words, row)})
    return rows


def tensors(target: Callable[[int], dict[str, Any]], *shape: int, name: str = "pixel_values") -> list[dict[str, Any]]:
    """Generate rows with a tensor of this shape."""
    drawn = torch.Generator().manual_seed(2)
    return [{name: torch.randn(*shape, generator=drawn), **target(row)} for row in range(24)]


def same(words: list[int], row: int) -> dict[str, Any]:
    return {"labels": list(words)}


def answer(words: list[int], row: int) -> dict[str, Any]:
    return {"labels": words[: 4 + row % 4]}


def a_class(words: list[int], row: int) -> dict[str, Any]:
    return {"labels": words[0] % CLASSES}


def choices() -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(4, WORDS, (24, 4, 10), generator=drawn)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": n % 4} for n, row in enumerate(ids)]


def masked(words: list[int], row: int) -> dict[str, Any]:
    """Mask every third word, as DataCollatorForLanguageModeling does for random ones."""
    labels = [word if at % 3 == row % 3 else -100 for at, word in enumerate(words)]
    return {
        "input_ids": [3 if label > 0 else word for word, label in zip(words, labels, strict=True)],
        "labels": labels,
    }


def pairs() -> list[dict[str, Any]]:
    """Generate pictures with texts of one length."""
    rows = tensors(lambda row: {"input_ids": [(7 * row + at) % 40 + 4 for at in range(9)] + [2]}, 3, 16, 16)
    return [{**row, "attention_mask": [1] * 10} for row in rows]


def contrasted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate as run_clip.py does."""
    return {**padded(rows), "return_loss": True}


def clip() -> torch.nn.Module:
    text = {**TEXT, "eos_token_id": 2, "bos_token_id": 1, "attention_dropout": 0.0, "hidden_act": "gelu"}
    sight = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=sight, projection_dim=16))


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=WORDS, n_positions=40, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", lora_dropout=0.0)
    return get_peft_model(gpt2(), adapters)


def vit(**more: Any) -> dict[str, Any]:
    return {
        "image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, **more,
    }  # fmt: skip


def segformer() -> torch.nn.Module:
    return hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
            strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=CLASSES,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        )
    )  # fmt: skip


def distilled(kind: Any) -> Any:
    """Return a subclass of a trainer whose loss compares with a teacher."""

    class Distilled(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            torch.manual_seed(7)
            self.teacher = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=CLASSES)).eval()

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                taught = self.teacher(**inputs).logits
            divergence = functional.kl_div(
                functional.log_softmax(outputs.logits / 2, dim=-1),
                functional.softmax(taught / 2, dim=-1),
                reduction="batchmean",
            )
            loss = 0.5 * outputs.loss + 2.0 * divergence
            return (loss, outputs) if return_outputs else loss

    return Distilled


def weighted(kind: Any) -> Any:
    """Return a subclass of a trainer whose loss weighs classes."""

    class Weighted(kind):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([0.2, 1.0, 3.0], device=labels.device)
            loss = functional.cross_entropy(outputs.logits, labels, weight=weights)
            return (loss, outputs) if return_outputs else loss

    return Weighted


SCRIPTS: dict[str, Script] = {
    "glue, BERT": Script(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=CLASSES)), texts(a_class)
    ),
    "regression, RoBERTa": Script(
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, num_labels=1)),
        texts(lambda words, row: {"labels": words[0] / WORDS}),
    ),
    "token classification, DistilBERT": Script(
        lambda: hf.DistilBertForTokenClassification(
            hf.DistilBertConfig(
                vocab_size=WORDS, dim=32, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=40, dropout=0.0,
                attention_dropout=0.0, num_labels=CLASSES,
            )
        ),
        texts(lambda words, row: {"labels": [word % CLASSES for word in words]}),
    ),
    "question answering, ELECTRA": Script(
        lambda: hf.ElectraForQuestionAnswering(hf.ElectraConfig(**TEXT, embedding_size=32)),
        texts(lambda words, row: {"start_positions": row % 5, "end_positions": row % 5 + 2}, least=LONGEST),
    ),
    "multiple choice, BERT": Script(lambda: hf.BertForMultipleChoice(hf.BertConfig(**TEXT)), choices()),
    "masked words, BERT": Script(lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)), texts(masked)),
    "language model, GPT-2": Script(gpt2, texts(same)),
    "language model, Llama": Script(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), texts(same)),
    "experts, Mixtral": Script(
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
        ),
        texts(same),
    ),
    "LoRA, GPT-2": Script(lora, texts(same)),
    "summarization, T5": Script(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=WORDS, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        texts(answer),
        generates=True,
    ),
    "translation, Marian": Script(
        lambda: hf.MarianMTModel(hf.MarianConfig(**TRANSLATION)), texts(answer), generates=True
    ),
    "translation, BART, smoothed": Script(
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**TRANSLATION)),
        texts(lambda words, row: {"labels": words[:6], "decoder_input_ids": [0, *words[:5]]}),
        generates=True,
        more={"label_smoothing_factor": 0.1},
    ),
    "images, ViT": Script(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**vit())),
        tensors(lambda row: {"labels": row % CLASSES}, 3, 16, 16),
    ),
    "images, ConvNeXT": Script(
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=CLASSES, patch_size=2)
        ),
        tensors(lambda row: {"labels": row % CLASSES}, 3, 16, 16),
    ),
    "images, ResNet": Script(
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES
            )
        ),
        tensors(lambda row: {"labels": row % CLASSES}, 3, 16, 16),
    ),
    "segmentation, Segformer": Script(
        segformer, tensors(lambda row: {"labels": (torch.arange(256).reshape(16, 16) + row) % CLASSES}, 3, 16, 16)
    ),
    "contrastive, CLIP": Script(clip, pairs(), contrasted),
    "audio classes, Wav2Vec2": Script(
        lambda: hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**SPEECH)),
        tensors(lambda row: {"labels": row % CLASSES}, 400, name="input_values"),
    ),
    "speech, Wav2Vec2 CTC": Script(
        lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)),
        tensors(lambda row: {"labels": [row % 8 + 2, 3, 5 + row % 3]}, 400, name="input_values"),
    ),
    "speech, Whisper": Script(
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                **{**TRANSLATION, "max_position_embeddings": 40}, num_mel_bins=8, max_source_positions=16,
                max_target_positions=40,
            )
        ),
        tensors(lambda row: {"labels": [4 + (row + at) % 40 for at in range(6)]}, 8, 32, name="input_features"),
        generates=True,
    ),
    "distillation, compute_loss": Script(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=CLASSES)),
        texts(a_class),
        own=distilled,
    ),
    "class weights, compute_loss": Script(
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=CLASSES)),
        texts(a_class),
        own=weighted,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        outcome: "equal" if losses and parameters have the same bits, "near", or the message of the error.
        losses, parameters: largest differences, of losses relative ones.
        seconds: CPU seconds of the script and of the pipelined script.
    """

    outcome: str
    losses: float = math.nan
    parameters: float = math.nan
    seconds: tuple[float, float] = (math.nan, math.nan)


def trained(script: Script, folder: Path, *, pipelined: bool, local: bool) -> tuple[Any, float]:
    """Train a script, and return its trainer and the CPU seconds."""
    torch.manual_seed(0)
    model = script.model()
    more: dict[str, Any] = {}
    if pipelined:
        kind: Any = raypipe.hf.PipelinedSeq2SeqTrainer if script.generates else raypipe.hf.PipelinedTrainer
        more = {"pipeline": raypipe.PipelineConfig(num_stages=2, partitioner="parameters"), "local": local}
    else:
        kind = hf.Seq2SeqTrainer if script.generates else hf.Trainer
    arguments = hf.TrainingArguments
    fields = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 1,
        "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "weight_decay": 0.01, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "eval_strategy": "epoch", **script.more,
    }  # fmt: skip
    if script.generates:
        arguments = hf.Seq2SeqTrainingArguments
        fields |= {"predict_with_generate": True, "generation_max_length": 8}
    trainer = script.own(kind)(
        model, arguments(str(folder), **fields), data_collator=script.collate or padded, train_dataset=script.rows,
        eval_dataset=script.rows[:8], **more,
    )  # fmt: skip
    trainer.pop_callback(hf.PrinterCallback)
    began = time.process_time()
    trainer.train()
    return trainer, time.process_time() - began


def compare(script: Script, *, local: bool = True) -> Row:
    """Train a script with Trainer and in a pipeline; one thread each, as stages compute."""
    from raypipe.engine.torch_settings import one_thread

    with tempfile.TemporaryDirectory() as folder, one_thread():
        plain, first_s = trained(script, Path(folder, "plain"), pipelined=False, local=local)
        try:
            piped, second_s = trained(script, Path(folder, "piped"), pipelined=True, local=local)
        except RaypipeError as error:
            return Row(f"{type(error).__name__}: {error}")
    losses = 0.0
    for ours, theirs in zip(piped.state.log_history, plain.state.log_history, strict=True):
        for name in ("loss", "eval_loss"):
            if name in theirs:
                losses = max(losses, abs(ours[name] - theirs[name]) / abs(theirs[name]))
    own = dict(piped.model.named_parameters())
    parameters = max(float((own[name] - p).abs().max()) for name, p in plain.model.named_parameters())
    outcome = "equal" if losses == parameters == 0 else "near"
    return Row(outcome, losses, parameters, (first_s, second_s))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a script fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of tasks")
    parser.add_argument("--ray", action="store_true", help="train on Ray instead of in threads")
    options = parser.parse_args(arguments)
    hf.logging.set_verbosity_error()
    print("| script | outcome | losses | parameters | s, Trainer | s, pipeline |\n|---|---|---|---|---|---|")
    failed = False
    for name, script in SCRIPTS.items():
        if options.only and not any(name.startswith(one) for one in options.only):
            continue
        row = compare(script, local=not options.ray)
        failed |= row.outcome not in ("equal", "near")
        numbers = (f"{row.losses:.1g}", f"{row.parameters:.1g}", *(f"{seconds:.1f}" for seconds in row.seconds))
        print(f"| {' | '.join((name, row.outcome, *numbers))} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
