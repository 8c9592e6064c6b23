"""Fine-tune adapters over a language model in 4 bits (QLoRA), in a pipeline of two stages.

    python jobs/train/qlora.py --output_dir tuned                        on Ray
    python jobs/train/qlora.py --output_dir tuned --local                in threads, without Ray
    python jobs/train/qlora.py --output_dir tuned --model FOLDER         a model of your own, with texts of random words

All arguments of transformers.TrainingArguments are accepted on the command line. Without --model the model is small and
generated here: a Llama with random weights, which is quantized as it is read. The adapter is saved as peft saves it.
Lines that differ from a script for transformers.Trainer are marked with "was".
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    set_seed,
)

import raypipe


@dataclass
class Options:
    """Arguments beside those of TrainingArguments."""

    local: bool = field(default=False, metadata={"help": "train in threads of this process, without Ray"})
    num_stages: int = field(default=2, metadata={"help": "stages of the pipeline"})
    model: str = field(default="", metadata={"help": "folder of a model; a small random one without it"})
    bits: int = field(default=4, metadata={"help": "bits of the frozen weights: 4 (NF4, quantized twice) or 8"})
    rank: int = field(default=8, metadata={"help": "rank of the adapters"})
    samples: int = field(default=64, metadata={"help": "texts to train on"})


def random_llama(folder: str) -> str:
    """Save a small Llama with random weights in ``folder``, and return the folder."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(folder: str, bits: int) -> torch.nn.Module:
    """Load a causal language model in 4 or 8 bits."""
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, use_cache=False
    )
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def texts(count: int, vocabulary: int) -> list[dict[str, Any]]:
    """Generate texts that count upwards from a random word, 16 words each."""
    drawn = torch.Generator().manual_seed(1)
    starts = torch.randint(1, vocabulary - 16, (count,), generator=drawn)
    return [{"input_ids": list(range(start, start + 16))} for start in starts.tolist()]


def main() -> int:
    """Train, save the adapter, and load it over the quantized model again."""
    parsed: Any = HfArgumentParser([TrainingArguments, Options]).parse_args_into_dataclasses()
    args, options = parsed
    set_seed(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        base: Any = quantized(options.model or random_llama(temporary), options.bits)
        again: Any = quantized(options.model or temporary, options.bits)
    lora = LoraConfig(r=options.rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = raypipe.hf.PipelinedTrainer(  # was: transformers.Trainer(
        get_peft_model(base, lora),
        args,
        data_collator=raypipe.data.Pad(16, labels="input_ids"),
        train_dataset=texts(options.samples, base.config.vocab_size),
        pipeline=raypipe.PipelineConfig(num_stages=options.num_stages),  # was not there
        local=options.local,  # was not there
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", trained.metrics)
    loaded, words = PeftModel.from_pretrained(again, args.output_dir), torch.arange(1, 17)[None]
    if not torch.allclose(loaded.train()(words).logits, trainer.model.train()(words).logits, atol=1e-6):
        raise SystemExit(f"the adapter in {args.output_dir} gives other logits than the trained model")
    print(f"loss {trained.training_loss:.3f}   saved {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
