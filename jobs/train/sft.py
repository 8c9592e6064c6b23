"""Fine-tune a language model as TRL's sft.py does, in a pipeline of two stages.

    python jobs/train/sft.py --output_dir tuned --max_length 32                 on Ray
    python jobs/train/sft.py --output_dir tuned --max_length 32 --local         in threads, without Ray
    python jobs/train/sft.py --output_dir tuned --max_length 32 --lora_rank 4   adapters only

Without a GPU add --use_cpu: bf16 is the default of TRL, which transformers otherwise refuses on a CPU.

All arguments of trl.SFTConfig are accepted on the command line. Model and data are small and generated here: a Llama
with random weights, and sums such as "3 plus 4 is" with "7" as their completion. Lines that differ from a script for
trl.SFTTrainer are marked with "was".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig

import raypipe

WORDS = ["<pad>", "<unk>", "<eos>", "plus", "is", *map(str, range(19))]


@dataclass
class Options:
    """Arguments beside those of SFTConfig."""

    local: bool = field(default=False, metadata={"help": "train in threads of this process, without Ray"})
    num_stages: int = field(default=2, metadata={"help": "stages of the pipeline"})
    lora_rank: int = field(default=0, metadata={"help": "rank of LoRA adapters; 0 trains all weights"})


def sums() -> Dataset:
    """Generate all sums of two digits, as prompts and completions."""
    return Dataset.from_list(
        [{"prompt": f"{a} plus {b} is", "completion": f" {a + b} <eos>"} for a in range(10) for b in range(10)]
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the words between spaces."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main() -> int:
    """Train, evaluate and save."""
    parsed: Any = HfArgumentParser([SFTConfig, Options]).parse_args_into_dataclasses()
    args, options = parsed
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    lora = LoraConfig(r=options.lora_rank, target_modules=["q_proj", "v_proj"]) if options.lora_rank else None
    trainer = raypipe.hf.PipelinedSFTTrainer(  # was: trl.SFTTrainer(
        LlamaForCausalLM(config),
        args=args,
        train_dataset=sums(),
        eval_dataset=sums(),
        processing_class=word_tokenizer(),
        peft_config=lora,
        pipeline=raypipe.PipelineConfig(num_stages=options.num_stages),  # was not there
        local=options.local,  # was not there
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    print(f"token accuracy {metrics['eval_mean_token_accuracy']:.3f}   saved {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
