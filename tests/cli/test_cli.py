"""The command line: what it prints is right, and its errors are one paragraph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from raypipe import __version__, cli
from raypipe.cli import app
from raypipe.errors import ConfigError
from raypipe.run.lease import HERE, Held, myself


def test_simulate_prints_picture_time_and_memory_and_writes_files(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"schedule.{kind}" for kind in ("csv", "trace", "svg")}
    options = [f"--{kind}={path}" for kind, path in files.items()]
    result = CliRunner().invoke(app, ["simulate", "--stages=2", "--microbatches=2", "--schedule=gpipe", *options])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0: F0 F1  .  . B0 B1\n1:  . F0 F1 B0 B1  .\n")
    assert "gpipe: 90.0 ms per step, workers idle 33.3% of it" in result.output
    assert "by stage: 2 2" in result.output
    assert files["csv"].read_text().splitlines()[0] == "0F0,0F1,0B0,0B1"
    assert len([e for e in json.loads(files["trace"].read_text())["traceEvents"] if e["ph"] == "X"]) >= 8
    ElementTree.parse(files["svg"])


def test_simulate_draws_zb_v_and_compares_it_with_1f1b_on_as_many_workers() -> None:
    """49 slots of 10 ms; 1F1B on two workers takes (8 + 1) * (20 + 40) ms, as its stages are twice as large."""
    result = CliRunner().invoke(app, ["simulate", "--schedule", "zb-v", "--stages", "4"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 ")
    assert "zb-v: 490.0 ms per step, workers idle 2.0% of it; 1f1b takes 540.0 ms" in result.output
    assert "by stage: 4 3 2 1" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "run.yaml", "--svg", "{}"],
        ["profile", "run.yaml", "-o", "{}"],
        ["simulate", "--csv", "{}"],
        ["simulate", "--svg", "{}"],
        ["probe", "--address", "10.255.0.1:1", "-o", "{}"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("output", "why"), [("", "it is a folder"), ("none/x.txt", "there is no folder ")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    arguments: list[str], output: str, why: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [part.format(tmp_path / output) for part in arguments])
    assert type(result.exception) is ConfigError
    assert str(result.exception).startswith(f"{tmp_path / output} cannot be written: {why}")
    assert list(tmp_path.iterdir()) == []


def test_prometheus_has_an_address(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["dashboards", "install", str(tmp_path / "boards"), "--prometheus", "prom:9090"])
    assert type(result.exception) is ConfigError
    assert str(result.exception) == "--prometheus prom:9090 is no address: give it as in http://localhost:9090."
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    waits = typer.Typer()
    waits.command()(interrupted)
    monkeypatch.setattr(cli, "app", waits)
    monkeypatch.setattr(sys, "argv", ["raypipe"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "raypipe: interrupted\n"


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such thing\nat all"), "raypipe: ValueError: no such thing at all This error is not raypipe's"),
        (ConfigError("no such field"), "raypipe: no such field"),
    ],
)
def test_an_error_is_one_line_or_a_traceback_with_raypipe_debug(
    error: Exception, line: str, debug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setenv("RAYPIPE_DEBUG", debug)
    with pytest.raises(type(error) if debug else SystemExit):
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if debug else 1)
    assert debug or lines[0].startswith(line)


@pytest.mark.slow
def test_mistakes_in_the_command_end_with_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for arguments in (
        ["trian"],
        ["train"],
        ["train", path, "--local", "--detach"],
        ["simulate", path, "--stages=3"],
        ["simulate", "--set", "a=b"],
        ["export", tmp_path, "-o", tmp_path / "x", "--to", "pickle"],
        ["export", tmp_path, "-o", tmp_path / "x", "--config", tmp_path],
        ["doctor", "--ports", "9-3"],
        ["doctor", "--ports", "some"],
    ):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 2, (arguments, result.output)


def ends_light(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    """One process that is given these commands in turn and then names what it imported that takes its time."""
    heavy = ("torch", "ray", "numpy", "pyarrow", "pandas")
    check = (
        "import sys; from raypipe.cli import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv[1:] = arguments\n"
        "    try: main()\n"
        "    except SystemExit as end: print('status', end.code)\n"
        f"print('heavy:', *sorted(set({heavy!r}) & set(sys.modules)), 'yaml:', 'yaml' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=240, check=True)


@pytest.mark.slow
def test_help_and_version_import_nothing_heavy() -> None:
    done = ends_light(["version"], ["--help"], ["train", "--help"])
    assert done.stdout.rstrip().endswith("heavy: yaml: False")


@pytest.mark.slow
def test_a_mistake_in_a_run_file_is_named_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {target: 'm:f'}\npipeline: {shedule: 1f1b}\n")
    done = ends_light(*([verb, str(path)] for verb in ("train", "plan", "simulate")))
    assert done.stderr.count(f"{path}, line 2: pipeline.shedule: unknown; did you mean schedule?") == 3
    assert "Traceback" not in done.stderr
    assert done.stdout.split("\n")[:3] == ["status 1"] * 3
    assert done.stdout.rstrip().endswith("heavy: yaml: True")


def folder_of_a_run(tmp_path: Path, *decisions: str) -> Path:
    folder = tmp_path / "lm"
    folder.mkdir(exist_ok=True)
    events = [{"time": 1.0, "decision": d, "reason": f"because of {d}", "step": 7} for d in decisions]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_run_that_is_over_answers_from_its_folder(tmp_path: Path) -> None:
    for decision, state in (("finish", "finished"), ("fail", "failed"), ("stop", "stopped")):
        folder = folder_of_a_run(tmp_path, "start", "fail", "start", "checkpoint", decision)
        result = CliRunner().invoke(app, ["status", str(folder)])
        assert result.exit_code == 0, result.output
        assert result.output == f"lm: {state}; because of {decision}; step 7\n"
        found = json.loads(CliRunner().invoke(app, ["status", str(folder), "--json"]).output)
        assert (found["name"], found["state"], found["step"]) == ("lm", state, 7)


def test_a_finished_run_is_found_by_name_or_path_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where nobody answers
    (tmp_path / "ray_results" / "runs").mkdir(parents=True)
    folder = folder_of_a_run(tmp_path / "ray_results" / "runs", "start", "finish")
    listed = CliRunner().invoke(app, ["list"]).output
    assert [line.split()[-1] for line in listed.splitlines()] == ["FOLDER", str(folder)]
    folder_of_a_run(tmp_path / "ray_results", "start", "finish")
    for run in ("lm", "runs/lm", "$HOME/ray_results/runs/lm", "~/ray_results/runs/lm", folder.as_uri()):
        assert CliRunner().invoke(app, ["status", run]).output == "lm: finished; because of finish; step 7\n"


def test_runs_are_listed(tmp_path: Path) -> None:
    me = myself()
    mine = me._replace(id="of this test")
    leases = {
        "running": Held(mine, 1, 0.0), "killed": Held(me._replace(started="1"), 2, 0.0),
        "failed": Held(me, 3, 0.0, released=True), "unknown": None,
    }  # fmt: skip
    HERE.add(mine.id)
    for age, (name, lease) in enumerate(leases.items()):
        (tmp_path / name).mkdir()
        events = [{"decision": "start", "reason": "", "step": 0, "num_steps": 9}, {"decision": "checkpoint", "step": 4}]
        (tmp_path / name / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        if lease is not None:
            text = json.dumps({**lease._asdict(), "holder": lease.holder._asdict()})
            (tmp_path / name / "lease.json").write_text(text)
        for file in (tmp_path / name).iterdir():
            os.utime(file, (1e9 + age, 1e9 + age))
    for number, end in enumerate(("finish", "stop", "fail")):
        folder = folder_of_a_run(tmp_path, "start", end).rename(tmp_path / end)
        os.utime(folder / "events.jsonl", (2e9 + number, 2e9 + number))
    (tmp_path / "something else").mkdir()
    result = CliRunner().invoke(app, ["list", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[0] == ["NAME", "STATE", "STEP", "LAST", "WRITE", "FOLDER"]
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9)).split()
    assert rows[1] == ["running", "running", "4/9", *date, str(tmp_path / "running")]
    assert [(row[0], row[1]) for row in rows[2:]] == [
        ("killed", "killed"), ("failed", "failed"), ("unknown", "unknown"),
        ("finish", "finished"), ("stop", "stopped"), ("fail", "failed"),
    ]  # fmt: skip
    found = json.loads(CliRunner().invoke(app, ["list", str(tmp_path), "--json"]).output)
    HERE.discard(mine.id)
    assert found[0] == {
        "name": "running", "state": "running", "step": 4, "num_steps": 9, "last_write_s": 1e9,
        "folder": str(tmp_path / "running"),
    }  # fmt: skip
    assert CliRunner().invoke(app, ["list", str(tmp_path / "nowhere")]).output == f"no runs in {tmp_path}/nowhere\n"


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(word: str) -> None:
    assert CliRunner().invoke(app, [word]).output.strip() == __version__
