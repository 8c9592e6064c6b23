"""Train a language model as transformers' run_clm.py does, in a pipeline of two stages.

    python jobs/train/run_clm.py --output_dir trained                             on Ray
    python jobs/train/run_clm.py --output_dir trained --local                     in threads, without Ray
    python jobs/train/run_clm.py --output_dir trained --train_file texts.txt      a text of your own

All arguments of transformers.TrainingArguments are accepted on the command line. The model is a small GPT-2 with random
weights, whose tokens are bytes. Without --train_file the text is that of a module of Python's standard library. Lines
that differ from a script for transformers.Trainer are marked with "was".
"""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from datasets import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import raypipe


@dataclass
class Options:
    """Arguments beside those of TrainingArguments."""

    train_file: str | None = field(default=None, metadata={"help": "text file to train on"})
    block_size: int = field(default=64, metadata={"help": "tokens of a sample"})
    max_blocks: int = field(default=128, metadata={"help": "samples to train on, at most"})
    local: bool = field(default=False, metadata={"help": "train in threads of this process, without Ray"})
    num_stages: int = field(default=2, metadata={"help": "stages of the pipeline"})


def blocks(text: str, size: int) -> Dataset:
    """Tokenize the lines of a text, join them, and cut them into blocks, of which the labels are the tokens."""

    def tokenized(lines: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(line.encode()) for line in lines["text"]]}

    def grouped(lines: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain(*lines["input_ids"]))
        cut = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": cut, "labels": cut}

    lines = Dataset.from_dict({"text": text.splitlines(keepends=True)})
    return lines.map(tokenized, batched=True, remove_columns=["text"]).map(grouped, batched=True, batch_size=None)


def main() -> int:
    """Train, evaluate and save."""
    parsed: Any = HfArgumentParser([TrainingArguments, Options]).parse_args_into_dataclasses()
    args, options = parsed
    set_seed(args.seed)
    text = Path(options.train_file).read_text() if options.train_file else inspect.getsource(textwrap)
    data = blocks(text, options.block_size)
    held = max(1, min(len(data), options.max_blocks) // 8)
    config = GPT2Config(
        vocab_size=256, n_positions=options.block_size, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    trainer = raypipe.hf.PipelinedTrainer(  # was: transformers.Trainer(
        GPT2LMHeadModel(config),
        args,
        data_collator=default_data_collator,
        train_dataset=data.select(range(held, min(len(data), options.max_blocks))),
        eval_dataset=data.select(range(held)),
        pipeline=raypipe.PipelineConfig(num_stages=options.num_stages),  # was not there
        local=options.local,  # was not there
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)
    print(f"perplexity {metrics['perplexity']:.3f}   saved {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
