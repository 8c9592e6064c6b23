"""jobs/train/finetune_hf.py, in threads, on folders that are made here: what is saved loads with equal logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from raypipe import load_state_dict

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
WORDS = ["the", "a", "cat", "dog", "runs", "sleeps", "eats", "fish", "and", "but", "never", "often"]
FLAGS = ("--local", "--steps", "2", "--length", "12", "--minibatch-size", "4", "--microbatches", "2")


def model_folder(folder: Path, kind: str) -> None:
    """A small model with random weights, and a tokenizer of a few words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    known: dict[str, Any] = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, **known)
        made: Any = transformers.GPT2LMHeadModel(config)
    elif kind == "bert":
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=16, **known,
        )  # fmt: skip
        made = transformers.BertForMaskedLM(config)
    else:
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2, decoder_start_token_id=0,
            **known,
        )  # fmt: skip
        made = transformers.T5ForConditionalGeneration(config)
    made.save_pretrained(folder)


def texts(file: Path, *, label: bool, target: bool) -> None:
    """Sixteen rows."""
    rows: list[dict[str, Any]] = []
    for number in range(16):
        row: dict[str, Any] = {"text": " ".join(WORDS[(number * 5 + n) % 12] for n in range(3 + number % 7))}
        if label:
            row["label"] = number % 3
        if target:
            row["target"] = " ".join(reversed(row["text"].split()))
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


TOGETHER = """
import contextlib, io, json, sys, traceback
from jobs.train.finetune_hf import main
from jobs.train.options import exit_status
for name, flags in json.loads(sys.stdin.read()).items():
    sys.argv[1:] = flags
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = exit_status(main)
        except Exception:
            traceback.print_exc()
            status = 1
    print(json.dumps([name, status, out.getvalue()]), flush=True)
"""
"""One process for many runs: it takes longer to load what they need than to train."""


def flags_of(folder: Path, kind: str, *more: str, label: bool = False, target: bool = False) -> list[str]:
    """What the job is told, of a model and data that are made here."""
    model_folder(folder / kind, kind)
    texts(folder / "texts.jsonl", label=label, target=target)
    return [
        *FLAGS, "--name", "run", "--storage", str(folder), "--model", str(folder / kind),
        "--data", str(folder / "texts.jsonl"), "--output", str(folder / "out"), *more,
    ]  # fmt: skip


def python(*command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, input=given, capture_output=True, text=True, timeout=400, check=False,
        env=environment,
    )  # fmt: skip


class Tuned(NamedTuple):
    """Where a run's folders are, its exit status, and what it said."""

    folder: Path
    status: int
    said: str


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tuned]:
    cases: dict[str, tuple[str, tuple[str, ...], dict[str, bool]]] = {
        "labels": ("bert", (), {"label": True}),
        "targets": ("t5", (), {"target": True}),
    }
    if find_spec("peft"):
        cases["adapter"] = ("gpt2", ("--lora-rank", "2"), {})
        cases["adapter of a classifier"] = ("bert", ("--lora-rank", "2"), {"label": True})
    folders = {name: tmp_path_factory.mktemp("tuned") for name in cases}
    flags = {name: flags_of(folders[name], kind, *more, **data) for name, (kind, more, data) in cases.items()}
    flags["labels"] += ["--eval-data", str(folders["labels"] / "texts.jsonl")]
    # At this rate it soon gets worse, and two more evaluations end the run.
    worse = ["--steps", "9", "--learning-rate", "1", "--eval-interval-steps", "1", "--patience", "2", "--keep-best"]
    flags["targets"] += ["--eval-data", str(folders["targets"] / "texts.jsonl"), *worse]
    done = python("-c", TOGETHER, given=json.dumps(flags))
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: Tuned(folders[name], status, said) for name, status, said in told}


def test_a_causal_model_is_trained_whole_and_loads_with_its_tokenizer(tmp_path: Path) -> None:
    import transformers

    flags = flags_of(tmp_path, "gpt2", "--eval-data", str(tmp_path / "texts.jsonl"))
    done = python("jobs/train/finetune_hf.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it gives the same logits" in done.stdout
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2").state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the cat")["input_ids"] == [4, 6]


def good(run: Tuned) -> None:
    assert run.status == 0, run.said
    assert "it gives the same logits" in run.said


def test_lora_leaves_an_adapter_for_the_model_that_it_began_with(tuned: dict[str, Tuned]) -> None:
    pytest.importorskip("peft")
    good(tuned["adapter"])
    assert (tuned["adapter"].folder / "out/adapter_model.safetensors").is_file()
    assert not (tuned["adapter"].folder / "out/model.safetensors").exists()


def test_what_the_folder_lacks_of_a_classifier_is_saved_with_the_adapter(tuned: dict[str, Tuned]) -> None:
    pytest.importorskip("peft")
    good(tuned["adapter of a classifier"])


def test_labels_make_a_classifier(tuned: dict[str, Tuned]) -> None:
    good(tuned["labels"])
    assert "  eval_accuracy " in tuned["labels"].said
    assert len(json.loads((tuned["labels"].folder / "out/config.json").read_text())["id2label"]) == 3


def test_a_sequence_to_sequence_model_learns_targets(tuned: dict[str, Tuned]) -> None:
    good(tuned["targets"])


def test_a_run_that_gets_worse_ends_early_and_saves_its_best_checkpoint(tuned: dict[str, Tuned]) -> None:
    folder, said = tuned["targets"].folder, tuned["targets"].said
    assert "stopped      eval_loss has not got better than" in said
    assert "goes on from there" not in said
    scores = pq.read_table(folder / "run/metrics.parquet")["eval_loss"].to_pylist()
    best = folder / f"run/checkpoints/step_{scores.index(min(scores)) + 1:07d}"
    assert len(scores) == scores.index(min(scores)) + 3, "two evaluations behind the best one"
    assert f"checkpoint   {best}\n" in said
    wanted, saved = load_state_dict(best), load_file(folder / "out/model.safetensors")
    assert all(torch.equal(wanted[name], tensor) for name, tensor in saved.items())
