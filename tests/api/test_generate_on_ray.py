"""Stage actors generate the tokens that threads generate, between the steps of a run too."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import FailureConfig

from raypipe import Callback
from raypipe.callbacks import Prompts
from raypipe.engine.io.checkpoint import checkpoint_name
from raypipe.errors import RaypipeError, StageError
from tests.api.test_generate import DRAWN, GIVEN, ROWS, generated_at, prompts, same_weights, trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]

LONG: dict[str, Any] = {"max_new_tokens": 39, "eos_token_id": -1, "pad_token_id": 0, "group_size": 1}
MANY = 40
"""Copies of the prompts, whose generation takes seconds."""


def test_actors_generate_as_threads_do(cluster: None, tmp_path: Path) -> None:
    made = trainer("gpt2", 2, tmp_path)
    tokens, mask = prompts("gpt2")
    given = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": -1, "do_sample": True, "top_k": 20}
    assert torch.equal(made.generate(tokens, **given), made.generate(tokens, local=True, **given))
    with pytest.raises(StageError, match="Stage 0 failed while it decoded"):
        made.generate(tokens + 60, **given)


class Writes(Callback):
    """Writes the text of every evaluation to a file; in the driver of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        tokens, mask = prompts("gpt2")
        self.prompts = Prompts(tokens, mask, **GIVEN, **DRAWN)

    def on_text(self, step: int, tokens: torch.Tensor) -> None:
        torch.save(tokens, Path(self.folder, f"{step}.pt"))


def test_a_run_generates_on_its_own_actors(cluster: None, tmp_path: Path) -> None:
    tokens, mask = prompts("gpt2")
    steps = {"eval_interval_steps": 3, "checkpoint_interval_steps": 1}
    made = trainer("gpt2", 2, tmp_path, eval_data=ROWS, callbacks=[Writes(tmp_path)], **steps)
    handle = made.start(num_steps=6)
    found = handle.generate(tokens, attention_mask=mask, **GIVEN)
    with pytest.raises(StageError, match="Stage 0 failed while it decoded"):
        handle.generate(tokens + 60)
    result = handle.wait()
    assert not result.alerts
    alone = trainer("gpt2", 2, tmp_path / "alone").fit(num_steps=6, local=True, progress=False)
    assert same_weights(result.checkpoint, alone.checkpoint)
    first, *_ = generated_at(tmp_path / "run")

    def of(step: int, **options: Any) -> torch.Tensor:
        path = tmp_path / "run" / checkpoint_name(step)
        return made.generate(tokens, attention_mask=mask, checkpoint=path, local=True, **GIVEN, **options)

    if first:  # the weights before the first step are in no checkpoint
        assert torch.equal(found, of(first))
    for step in (3, 6):
        assert torch.equal(torch.load(tmp_path / f"{step}.pt"), of(step, **DRAWN))


def test_a_worker_that_is_lost_while_it_generates_is_replaced(cluster: None, tmp_path: Path) -> None:
    tokens, mask = (x.repeat(MANY, 1) for x in prompts("gpt2"))
    made = trainer("gpt2", 2, tmp_path)
    run: Any = made._run
    made._run = SimpleNamespace(**vars(run), failure_config=FailureConfig(max_failures=1))
    handle = made.start(num_steps=10**6)
    wait_until(lambda: handle.status().step > 5, 120)
    failed = list[RaypipeError]()

    def ask() -> None:
        try:
            handle.generate(tokens, attention_mask=mask, **LONG)
        except RaypipeError as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: _stands(handle), 120)
    os.kill(handle.status().stages[1]["process"], signal.SIGKILL)
    asking.join(120)
    (error,) = failed
    assert str(error).startswith("The text was not generated: A stage died while")
    step = handle.status().step
    wait_until(lambda: handle.status().step > step + 5, 120)
    handle.stop()
    result = handle.wait(timeout_s=120)
    steps = handle.status().step
    alone = trainer("gpt2", 2, tmp_path / "alone").fit(num_steps=steps, local=True, progress=False)
    assert same_weights(result.checkpoint, alone.checkpoint)


def _stands(handle: Any) -> bool:
    """Return True if the run does no step for a second."""
    before = handle.status().step
    time.sleep(1.0)
    return bool(handle.status().step == before)
