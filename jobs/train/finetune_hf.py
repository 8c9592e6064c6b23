"""Fine-tune a model of Hugging Face on two stages, from its folder and back into one: whole, or by LoRA.

    python jobs/train/finetune_hf.py --model gpt2 --data texts.jsonl --output gpt2-tuned
    python jobs/train/finetune_hf.py --model llama --data texts.jsonl --output adapter --lora-rank 8
    python jobs/train/finetune_hf.py --model bert --data reviews.jsonl --output tuned     a classifier
    python jobs/train/finetune_hf.py --config tune.yaml --local     the same names in a file; in threads, without Ray

The folder has config.json, weights and the tokenizer's files; nothing is downloaded. A line of the data is
{"text": ...}, for a classifier {"text": ..., "label": 0}, for a sequence-to-sequence model {"text": ..., "target":
...}. Rows are padded to --length tokens. What was trained is saved with the tokenizer, loaded again by
``from_pretrained`` (of peft, for LoRA), and has to give the same logits. --eval-data, --eval-interval-steps, --patience
and --keep-best evaluate, stop early, and save what was best. A name that was used goes on; exit status 1 where
anything fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.train.options import add_common, arguments_of, chosen, data_folder, exit_status, goes_on, train
from jobs.train.text_rows import TASKS, Rows, count_classes, read_lines, write_rows
from raypipe import load_state_dict

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "classify": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
PEFT_TASKS = {"causal": "CAUSAL_LM", "classify": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}


def main() -> int:
    """Tokenise, train, save, and check that the saved parameters are the trained ones."""
    options = parse()

    if not (options.model / "config.json").is_file():
        raise ValueError(f"{options.model} has no config.json. Give the folder of a model.")
    lines = read_lines(options.data)
    held = None if options.eval_data is None else read_lines(options.eval_data)
    task = options.task or task_of(options.model, lines)
    classes = count_classes(lines, held or {}) if task == "classify" else 0
    tokenizer, folder = _tokenizer(options.model), data_folder(options)
    more: dict[str, Any] = {"train_data": write_rows(task, lines, tokenizer, options.length, f"{folder}/train.parquet")}
    if held is not None:
        more["eval_data"] = write_rows(task, held, tokenizer, options.length, f"{folder}/eval.parquet")
        if task == "classify":
            more["metrics"] = {"accuracy": accuracy}
    model = _model(options, task, classes, tokenizer.pad_token_id)
    cached = getattr(model.config, "use_cache", True)
    model.config.use_cache = False  # while it trains; not in what is saved
    _, result = train(options, model, **more)
    if goes_on(options, result):
        return 0
    model.load_state_dict(load_state_dict(chosen(options, result)))
    model.config.use_cache = cached
    model.save_pretrained(options.output)
    _tokenizer(options.model).save_pretrained(options.output)  # the other one pads and truncates as training does
    again = _loaded(options, task, model)
    row = tokenizer(next(iter(lines.values()))["text"], truncation=True, max_length=options.length, return_tensors="pt")
    if not torch.equal(_logits(task, model, row), _logits(task, again, row)):
        raise ValueError(f"{options.output} was saved, but loaded again it gives other logits.")
    print(f"saved        {options.output}   (loaded again, it gives the same logits)")
    return 0


def accuracy(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """Count (texts that a classifier gives their label, texts)."""
    right = output.logits.argmax(-1) == batch["labels"]
    return right.sum(), len(right)


def task_of(folder: Path, rows: Rows) -> str:
    """Choose the task by the model's configuration, unless the data has labels.

    Raises:
        ValueError: the task is unclear: a causal task is useless for a model that attends to the future, as an encoder.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if any(row.get("label") is not None for row in rows.values()):
        return "classify"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("is_encoder_decoder"):
        return "seq2seq"
    names = config.get("architectures") or []
    if not set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ValueError(
            f"{folder} holds {', '.join(names) or 'a model of no known class'}, which is not a causal model, and the "
            "data has no labels. Give the rows labels, or give --task causal if the model looks at no later token."
        )
    return "causal"


def _tokenizer(folder: Path) -> Any:
    import transformers

    found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if found.pad_token is None:
        found.pad_token = found.eos_token
    if found.pad_token is None:
        raise ValueError(f"The tokenizer of {folder} has neither a pad nor an end-of-text token. Give it a pad_token.")
    return found


def _model(options: argparse.Namespace, task: str, classes: int, pad: int) -> Any:
    """Load the model in training mode, with adapters for ``--lora-rank``; new weights are drawn from --seed."""
    import transformers

    torch.manual_seed(options.seed)
    config: dict[str, Any] = {"num_labels": classes} if classes else {}
    model, found = getattr(transformers, AUTO_CLASSES[task]).from_pretrained(
        options.model, local_files_only=True, dtype=torch.float32, output_loading_info=True, **config
    )
    if task == "classify":
        model.config.pad_token_id = pad
    if options.lora_rank:
        from peft import LoraConfig, get_peft_model

        targets = options.lora_targets or None
        settings = LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha or 2 * options.lora_rank,
            lora_dropout=options.lora_dropout,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            task_type=PEFT_TASKS[task],
            # The folder has no weights for these, as for a classifier's head: they are trained and saved whole.
            modules_to_save=sorted({name.rpartition(".")[0] for name in found["missing_keys"]}) or None,
        )
        model = get_peft_model(model, settings)
    return model.train()


def _loaded(options: argparse.Namespace, task: str, trained: Any) -> Any:
    """Load what was saved, as a user does."""
    import transformers

    loads = getattr(transformers, AUTO_CLASSES[task])
    if not options.lora_rank:
        return loads.from_pretrained(options.output, local_files_only=True, dtype=torch.float32)
    from peft import PeftModel

    labels = {"num_labels": trained.config.num_labels} if task == "classify" else {}
    base = loads.from_pretrained(options.model, local_files_only=True, dtype=torch.float32, **labels)
    base.config.pad_token_id = trained.config.pad_token_id
    return PeftModel.from_pretrained(base, options.output)


def _logits(task: str, model: Any, row: Any) -> torch.Tensor:
    more = {"decoder_input_ids": row["input_ids"]} if task == "seq2seq" else {}
    with torch.no_grad():
        return model.eval()(input_ids=row["input_ids"], attention_mask=row["attention_mask"], **more).logits


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, name="finetune", minibatch_size=16, learning_rate=5e-5)
    parser.add_argument("--model", type=Path, help="folder with config.json, weights and tokenizer; required")
    parser.add_argument("--data", type=Path, help=".jsonl, .parquet or .txt (a row per line); required")
    parser.add_argument("--eval-data", type=Path, help="the same, to evaluate: loss, and accuracy of a classifier")
    parser.add_argument("--output", type=Path, help="folder for what was trained; required")
    parser.add_argument("--task", choices=TASKS, help="default: that of config.json and the data")
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
