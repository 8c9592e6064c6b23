"""Fine-tune a sequence-to-sequence model as transformers' run_summarization.py does, in a pipeline of two stages.

    python jobs/train/run_summarization.py --output_dir tuned --predict_with_generate            on Ray
    python jobs/train/run_summarization.py --output_dir tuned --predict_with_generate --local    in threads, without Ray

All arguments of transformers.Seq2SeqTrainingArguments are accepted on the command line. Model and data are small and
generated here: a T5 with random weights, and texts of which the summary is the word that occurs most often. Lines that
differ from a script for transformers.Seq2SeqTrainer are marked with "was".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from transformers import (
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

import raypipe

PAD, EOS, VOCABULARY = 0, 1, 48


@dataclass
class Options:
    """Arguments beside those of Seq2SeqTrainingArguments."""

    local: bool = field(default=False, metadata={"help": "train in threads of this process, without Ray"})
    num_stages: int = field(default=2, metadata={"help": "stages of the pipeline"})
    samples: int = field(default=128, metadata={"help": "texts to train on"})


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Generate texts of 9 to 20 words, and their summaries of one to three words, all of them the same word."""
    drawn = torch.Generator().manual_seed(seed)
    rows = []
    for n in range(count):
        word = int(torch.randint(2, VOCABULARY, (1,), generator=drawn))
        text = torch.randint(2, VOCABULARY, (8 + n % 12,), generator=drawn)
        text[torch.randperm(len(text), generator=drawn)[:5]] = word
        rows.append({"input_ids": [*text.tolist(), EOS], "labels": [word] * (1 + n % 3) + [EOS]})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest text and the longest summary of the batch, as DataCollatorForSeq2Seq does."""

    def stacked(column: str, fill: int) -> torch.Tensor:
        lists = [torch.tensor(row[column]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=fill)

    tokens, labels = stacked("input_ids", PAD), stacked("labels", -100)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


def first_words(prediction: Any) -> dict[str, float]:
    """Return the share of generated summaries that begin with the right word."""
    generated, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    return {"first_word": float((generated[:, 1] == labels[:, 0]).mean())}


def main() -> int:
    """Train, evaluate and save."""
    parsed: Any = HfArgumentParser([Seq2SeqTrainingArguments, Options]).parse_args_into_dataclasses()
    args, options = parsed
    set_seed(args.seed)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
    )  # fmt: skip
    trainer = raypipe.hf.PipelinedSeq2SeqTrainer(  # was: transformers.Seq2SeqTrainer(
        T5ForConditionalGeneration(config),
        args,
        data_collator=padded,
        train_dataset=texts(options.samples, seed=1),
        eval_dataset=texts(32, seed=2),
        compute_metrics=first_words if args.predict_with_generate else None,
        pipeline=raypipe.PipelineConfig(num_stages=options.num_stages),  # was not there
        local=options.local,  # was not there
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    metrics = trainer.evaluate(max_length=6)
    trainer.save_metrics("eval", metrics)
    print(f"loss {metrics['eval_loss']:.3f}   saved {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
