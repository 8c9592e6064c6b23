"""The job of docs/cli.md, from a project that ``raypipe init`` made: submitted again with a change, it goes on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.starter import write
from tests.runtime.raylets import RAY, Home

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
COMMAND = "ray job submit --working-dir . -- raypipe train run.yaml --set run_config.name=spirals"


def test_the_command_is_the_documented_one() -> None:
    assert f"\n{COMMAND}\n" in (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert f"#   {COMMAND}\n" in (ROOT / "raypipe/starter/run.yaml").read_text(encoding="utf-8")


def test_a_job_goes_on_after_a_comment_was_changed(head: Home, tmp_path: Path) -> None:
    project, home = tmp_path / "p", tmp_path / "home"
    home.mkdir()
    write(project)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    inside = json.dumps({"env_vars": {"HOME": str(home), "PATH": path}})  # a job has those of the head else
    environment = {
        **os.environ,
        "PATH": path,
        "RAY_ADDRESS": head.address,
        "RAY_API_SERVER_ADDRESS": f"http://{head.head}:{head.dashboard_port}",
    }

    def submitted(*more: str) -> str:
        first, _, entrypoint = COMMAND.partition(" -- ")
        options = shlex.split(first.removeprefix("ray "))
        command = [RAY, *options, "--runtime-env-json", inside, "--", *shlex.split(entrypoint), *more]
        done = subprocess.run(
            command, env=environment, cwd=project, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    folder = home / "ray_results" / "runs" / "spirals"
    assert f"run folder   {folder}\n" in submitted("--set", "num_steps=20")
    (project / "run.yaml").write_text(f"# changed\n{(project / 'run.yaml').read_text()}")
    again = submitted("--set", "num_steps=30")
    assert f"spirals goes on after step 20, from {folder}/checkpoints/step_0000020" in again
    assert f"checkpoint   {folder}/checkpoints/step_0000030\n" in again
