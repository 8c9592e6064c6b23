"""jobs/train/qlora.py, on Ray and in threads: the same logs and adapters, and a resumed run has them too."""

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

pytest.importorskip("bitsandbytes", reason="bitsandbytes is of the extra 'quantized'")
pytestmark = pytest.mark.ray

FLAGS = (
    "--use_cpu --report_to none --disable_tqdm true --samples 32 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --max_steps 6 --logging_steps 1 --save_steps 3 --learning_rate 1e-2"
)


def qlora(folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the job and return its logs without times."""
    done = subprocess.run(
        [sys.executable, "jobs/train/qlora.py", "--output_dir", str(folder), *FLAGS.split(), *more],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
             "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved" in done.stdout
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())
    return [{k: v for k, v in log.items() if not k.endswith(("runtime", "second"))} for log in state["log_history"]]


def adapter(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_on_ray_in_threads_and_resumed_it_has_the_same_logs_and_adapters(tmp_path: Path) -> None:
    on_ray, in_threads = tmp_path / "ray", tmp_path / "threads"
    logs = qlora(on_ray)
    assert len(adapter(on_ray)) == 16
    assert qlora(in_threads, "--local") == logs
    assert unequal(adapter(in_threads), adapter(on_ray)) == []
    again = tmp_path / "again"
    (on_ray / "checkpoint-3").rename(again)
    assert qlora(in_threads, "--local", "--resume_from_checkpoint", str(again)) == logs
    assert unequal(adapter(in_threads), adapter(on_ray)) == []
