"""Fine-tune a model of Hugging Face on two stages, from its folder and back into one: whole, or by LoRA.

    python jobs/train/finetune_hf.py --model gpt2 --data texts.jsonl --output gpt2-tuned
    python jobs/train/finetune_hf.py --model llama --data texts.jsonl --output adapter --lora-rank 8
    python jobs/train/finetune_hf.py --model bert --data reviews.jsonl --output tuned     a classifier
    python jobs/train/finetune_hf.py --config tune.yaml --local     the same names in a file; in threads, without Ray

The folder has config.json, weights and the tokenizer's files; nothing is downloaded. A line of the data is
{"text": ...}, for a classifier {"text": ..., "label": 0}, for a sequence-to-sequence model {"text": ..., "target":
...}. Rows are padded to --length tokens. What was trained is saved with the tokenizer, loaded again by
``from_pretrained`` (of peft, for LoRA), and has to give the same logits. A name that was used goes on;
exit status 1 where anything fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.train.options import add_common, arguments_of, exit_status, train
from jobs.train.text_rows import TASKS, read_lines, write_rows
from raypipe import load_state_dict

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "classify": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
PEFT_TASKS = {"causal": "CAUSAL_LM", "classify": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}


def main() -> int:
    """Tokenise, train, save, and look whether what was saved is what was trained."""
    asked = parse()
    import transformers

    if not (asked.model / "config.json").is_file():
        raise ValueError(f"{asked.model} has no config.json. Give the folder of a model.")
    lines = read_lines(asked.data)
    task = asked.task or _task_of(asked.model, lines[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    folder = Path(asked.storage).resolve() / f"{asked.name}-data"
    more: dict[str, Any] = {
        "train_data": str(write_rows(task, lines, tokenizer, asked.length, folder / "train.parquet"))
    }
    if asked.eval_data is not None:
        held = write_rows(task, read_lines(asked.eval_data), tokenizer, asked.length, folder / "eval.parquet")
        more["eval_data"] = str(held)
    model = _model(asked, task, lines, tokenizer.pad_token_id)
    _, result = train(asked, model, **more)
    if result.stopped:
        return 0
    model.load_state_dict(load_state_dict(result.checkpoint))
    model.save_pretrained(asked.output)
    tokenizer.save_pretrained(asked.output)
    again = _loaded(asked, task, model)
    row = tokenizer(lines[0]["text"], truncation=True, max_length=asked.length, return_tensors="pt")
    if not torch.equal(_logits(task, model, row), _logits(task, again, row)):
        raise ValueError(f"{asked.output} was saved, but loaded again it gives other logits.")
    print(f"saved        {asked.output}   (loaded again, it gives the same logits)")
    return 0


def _task_of(folder: Path, line: dict[str, Any]) -> str:
    """What the model's own configuration says, unless the data has labels."""
    if "label" in line:
        return "classify"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "seq2seq" if config.get("is_encoder_decoder") else "causal"


def _model(asked: argparse.Namespace, task: str, lines: list[dict[str, Any]], pad: int) -> Any:
    """In training mode, with adapters where they are asked for; new weights are drawn from --seed."""
    import transformers

    torch.manual_seed(asked.seed)
    config: dict[str, Any] = {"num_labels": 1 + max(int(line["label"]) for line in lines)} if task == "classify" else {}
    model, found = getattr(transformers, AUTO_CLASSES[task]).from_pretrained(
        asked.model, local_files_only=True, dtype=torch.float32, output_loading_info=True, **config
    )
    model.config.use_cache = False
    if task == "classify":
        model.config.pad_token_id = pad
    if asked.lora_rank:
        from peft import LoraConfig, get_peft_model

        targets = asked.lora_targets or None
        settings = LoraConfig(
            r=asked.lora_rank,
            lora_alpha=asked.lora_alpha or 2 * asked.lora_rank,
            lora_dropout=asked.lora_dropout,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            task_type=PEFT_TASKS[task],
            # The folder has no weights for these, as for a classifier's head: they are trained and saved whole.
            modules_to_save=sorted({name.rpartition(".")[0] for name in found["missing_keys"]}) or None,
        )
        model = get_peft_model(model, settings)
    return model.train()


def _loaded(asked: argparse.Namespace, task: str, trained: Any) -> Any:
    """What was saved, as anybody loads it."""
    import transformers

    loads = getattr(transformers, AUTO_CLASSES[task])
    if not asked.lora_rank:
        return loads.from_pretrained(asked.output, local_files_only=True, dtype=torch.float32)
    from peft import PeftModel

    labels = {"num_labels": trained.config.num_labels} if task == "classify" else {}
    base = loads.from_pretrained(asked.model, local_files_only=True, dtype=torch.float32, **labels)
    base.config.pad_token_id = trained.config.pad_token_id
    return PeftModel.from_pretrained(base, asked.output)


def _logits(task: str, model: Any, row: Any) -> torch.Tensor:
    more = {"decoder_input_ids": row["input_ids"]} if task == "seq2seq" else {}
    with torch.no_grad():
        return model.eval()(input_ids=row["input_ids"], attention_mask=row["attention_mask"], **more).logits


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, name="finetune", minibatch_size=16, learning_rate=5e-5)
    parser.add_argument("--model", type=Path, help="folder with config.json, weights and tokenizer; required")
    parser.add_argument("--data", type=Path, help=".jsonl, .parquet or .txt (a row per line); required")
    parser.add_argument("--eval-data", type=Path, help="the same, to evaluate at the end")
    parser.add_argument("--output", type=Path, help="folder for what was trained; required")
    parser.add_argument("--task", choices=TASKS, help="what config.json and the data say, where it is left out")
    parser.add_argument("--length", type=int, default=128, help="tokens per row, longer texts are cut")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains the whole model")
    parser.add_argument("--lora-alpha", type=int, help="twice the rank, where it is left out")
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    parser.add_argument("--lora-targets", nargs="+", help="modules; 'all-linear', or peft's choice for the model")
    found = arguments_of(parser)
    for name in ("model", "data", "output"):
        if getattr(found, name) is None:
            parser.error(f"--{name} is missing")
    return found


if __name__ == "__main__":
    sys.exit(exit_status(main))
