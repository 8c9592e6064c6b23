"""jobs/train/run_glue.py, on Ray and in threads: the same logs and weights, and a resumed run has them too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exactness import unequal
from tests.sources import ROOT

pytestmark = pytest.mark.ray

FLAGS = (
    "--use_cpu --report_to none --disable_tqdm true --samples 48 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --num_train_epochs 2 --logging_steps 1 --eval_strategy steps --eval_steps 4 "
    "--save_steps 4 --load_best_model_at_end --metric_for_best_model accuracy --save_total_limit 3"
)


def run_glue(folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the job and return its logs without times."""
    done = subprocess.run(
        [sys.executable, "jobs/train/run_glue.py", "--output_dir", str(folder), *FLAGS.split(), *more],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout
    state = json.loads((folder / "checkpoint-12" / "trainer_state.json").read_text())
    return [{k: v for k, v in log.items() if not k.endswith(("runtime", "second"))} for log in state["log_history"]]


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "checkpoint-12" / "model.safetensors")


def test_on_ray_in_threads_and_resumed_it_has_the_same_logs_and_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    on_ray, in_threads = tmp_path / "ray", tmp_path / "threads"
    logs = run_glue(on_ray)
    assert [log["step"] for log in logs if "eval_accuracy" in log] == [4, 8, 12]
    assert run_glue(in_threads, "--local") == logs
    assert unequal(weights(in_threads), weights(on_ray)) == []
    again = tmp_path / "again"
    (on_ray / "checkpoint-8").rename(again)
    assert run_glue(in_threads, "--local", "--resume_from_checkpoint", str(again)) == logs
    assert unequal(weights(in_threads), weights(on_ray)) == []
