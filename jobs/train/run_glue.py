"""Fine-tune a text classifier as transformers' run_glue.py does, in a pipeline of two stages.

    python jobs/train/run_glue.py --output_dir tuned                        on Ray
    python jobs/train/run_glue.py --output_dir tuned --local                in threads, without Ray
    python jobs/train/run_glue.py --output_dir tuned --resume_from_checkpoint tuned/checkpoint-30

All arguments of transformers.TrainingArguments are accepted on the command line. Model and data are small and generated
here: a BERT with random weights, and sentences whose class is that of the most frequent of three words. Lines that
differ from a script for transformers.Trainer are marked with "was".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments, set_seed

import raypipe

CLASSES, VOCABULARY = 3, 64


@dataclass
class Options:
    """Arguments beside those of TrainingArguments."""

    local: bool = field(default=False, metadata={"help": "train in threads of this process, without Ray"})
    num_stages: int = field(default=2, metadata={"help": "stages of the pipeline"})
    samples: int = field(default=256, metadata={"help": "sentences to train on"})


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Generate sentences of 8 to 24 words, with the most frequent of the words 3, 4 and 5 as their class."""
    drawn = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        label = int(torch.randint(CLASSES, (1,), generator=drawn))
        words = torch.randint(3, VOCABULARY, (int(torch.randint(8, 25, (1,), generator=drawn)),), generator=drawn)
        words[torch.randperm(len(words), generator=drawn)[: len(words) // 3]] = 3 + label
        rows.append({"input_ids": words.tolist(), "label": label})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sentence of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of sentences that get their class."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> int:
    """Train, evaluate and save."""
    parsed: Any = HfArgumentParser([TrainingArguments, Options]).parse_args_into_dataclasses()
    args, options = parsed
    set_seed(args.seed)
    config = BertConfig(
        num_labels=CLASSES, vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32,
    )  # fmt: skip
    trainer = raypipe.hf.PipelinedTrainer(  # was: transformers.Trainer(
        BertForSequenceClassification(config),
        args,
        data_collator=padded,
        train_dataset=sentences(options.samples, seed=1),
        eval_dataset=sentences(64, seed=2),
        compute_metrics=accuracy,
        pipeline=raypipe.PipelineConfig(num_stages=options.num_stages),  # was not there
        local=options.local,  # was not there
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    print(f"accuracy {metrics['eval_accuracy']:.3f}   saved {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
