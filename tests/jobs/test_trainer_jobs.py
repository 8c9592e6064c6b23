"""jobs/train/{run_clm,run_summarization,sft,dpo}.py in threads: each trains, evaluates and saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = pytest.mark.ray

FLAGS = (
    "--local --use_cpu --report_to none --disable_tqdm true --max_steps 2 --per_device_train_batch_size 4 --bf16 false"
)


@pytest.mark.parametrize(
    ("job", "more", "measured"),
    [
        ("run_clm", "--max_blocks 32", "perplexity"),
        ("run_summarization", "--predict_with_generate --samples 16", "eval_first_word"),
        ("sft", "--lora_rank 2", "eval_mean_token_accuracy"),
        ("dpo", "--samples 16", "eval_rewards/accuracies"),
    ],
)
def test_it_trains_evaluates_and_saves(tmp_path: Path, job: str, more: str, measured: str) -> None:
    pytest.importorskip("trl" if job in ("sft", "dpo") else "transformers")
    done = subprocess.run(
        [sys.executable, f"jobs/train/{job}.py", "--output_dir", str(tmp_path), *FLAGS.split(), *more.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert measured in json.loads((tmp_path / "eval_results.json").read_text())
    assert list(tmp_path.glob("*model.safetensors"))
