"""Train a language model on preferences as TRL's dpo.py does, in a pipeline of two stages.

    python jobs/train/dpo.py --output_dir tuned                      on Ray
    python jobs/train/dpo.py --output_dir tuned --local              in threads, without Ray

Without a GPU add --use_cpu: bf16 is the default of TRL, which transformers otherwise refuses on a CPU.

All arguments of trl.DPOConfig are accepted on the command line. Model and data are small and generated here: a Llama
with random weights, and questions to which the answer "yes" is preferred to "no". Lines that differ from a script for
trl.DPOTrainer are marked with "was".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig

import raypipe

WORDS = ["<pad>", "<unk>", "<eos>", "yes", "no", *(f"word{n}" for n in range(59))]


@dataclass
class Options:
    """Arguments beside those of DPOConfig."""

    local: bool = field(default=False, metadata={"help": "train in threads of this process, without Ray"})
    num_stages: int = field(default=2, metadata={"help": "stages of the pipeline"})
    samples: int = field(default=64, metadata={"help": "pairs of answers to train on"})


def preferences(count: int, seed: int) -> Dataset:
    """Generate questions of 4 to 11 words with a preferred and a rejected answer."""
    drawn = torch.Generator().manual_seed(seed)
    rows = []
    for n in range(count):
        asked = torch.randint(5, len(WORDS), (4 + n % 8,), generator=drawn).tolist()
        rows.append(
            {"prompt": " ".join(WORDS[word] for word in asked), "chosen": " yes <eos>", "rejected": " no <eos>"}
        )
    return Dataset.from_list(rows)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the words between spaces."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main() -> int:
    """Train, evaluate and save."""
    parsed: Any = HfArgumentParser([DPOConfig, Options]).parse_args_into_dataclasses()
    args, options = parsed
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    trainer = raypipe.hf.PipelinedDPOTrainer(  # was: trl.DPOTrainer(
        LlamaForCausalLM(config),
        args=args,
        train_dataset=preferences(options.samples, seed=1),
        eval_dataset=preferences(32, seed=2),
        processing_class=word_tokenizer(),
        pipeline=raypipe.PipelineConfig(num_stages=options.num_stages),  # was not there
        local=options.local,  # was not there
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    print(f"preferred {metrics['eval_rewards/accuracies']:.3f}   saved {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
