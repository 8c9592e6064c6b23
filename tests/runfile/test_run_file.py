"""Run files: every mistake is named with file, line and key, overrides win, and what is written is read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config.pipeline import _ALLOWED, SUPPORTED, PipelineConfig
from raypipe.errors import ConfigError
from raypipe.runfile.run_file import RunFile, read_runfile, to_yaml, with_name

SMALLEST = """\
model: {target: "m:Model"}
optimizer:
  target: torch.optim:AdamW
  args: {lr: 3e-4}
train_data: data/train
"""
WHOLE = (
    SMALLEST
    + """\
loss_fn: {target: "m:loss"}
pipeline:
  num_stages: 2
  schedule: 1f1b
scaling_config: {num_workers: 2}
run_config: {name: lm, storage_path: runs, checkpoint_config: {num_to_keep: 3}}
num_steps: 10
"""
)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_runfile(written(folder, text), overrides)
    return str(caught.value)


def test_a_file_is_read_and_its_paths_are_made_absolute(tmp_path: Path) -> None:
    run = read_runfile(written(tmp_path, WHOLE))
    assert run.values["optimizer"]["args"] == {"lr": 3e-4}
    assert run.values["train_data"] == str(Path.cwd() / "data/train")
    assert run.values["run_config"]["storage_path"] == str(Path.cwd() / "runs")
    assert run.length == {"num_steps": 10}
    remote = read_runfile(written(tmp_path, WHOLE), ["train_data=s3://bucket/x"])
    assert remote.values["train_data"] == "s3://bucket/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (WHOLE.replace("schedule:", "shedule:"), ["line 9", "pipeline.shedule: unknown; did you mean schedule?"]),
        (WHOLE.replace("model:", "modle:"), ["line 1", "modle: unknown; did you mean model?"]),
        (WHOLE.replace("args:", "arg:"), ["line 4", "optimizer.arg: unknown; did you mean args?"]),
        (WHOLE.replace("num_stages:", "stages:"), ["line 8", "pipeline.stages: unknown; did you mean num_stages?"]),
        (
            WHOLE + "num_stages: 4\n",
            ["line 13", "num_stages: it is a field of pipeline: write it there, as in pipeline: {"],
        ),
        (
            WHOLE + "name: first\n",
            ["name: it is a field of run_config: write it there, as in run_config: {name: ...}."],
        ),
        (
            WHOLE.replace("runs", "$NOT_SET/runs"),
            ["run_config.storage_path: The path $NOT_SET/runs names the variable $NOT_SET, which is not set."],
        ),
        (WHOLE + "batch_size: 4\n", ["batch_size: unknown; possible are model, loss_fn,"]),
        (SMALLEST + "pipeline: {batch_size: 4}\n", ["pipeline.batch_size: unknown; did you mean minibatch_size?"]),
        (SMALLEST + "pipeline: {lr: 4}\n", ["pipeline.lr: unknown; possible are num_stages,"]),
        (WHOLE.replace("1f1b", "1f2b"), ["line 9", "pipeline.schedule", "'1f2b'", "Did you mean '1f1b'?"]),
        (WHOLE.replace("num_stages: 2", "num_stages: two"), ["line 8", "pipeline.num_stages", "'two'"]),
        (WHOLE.replace("num_stages: 2", "group_size: 2"), ["line 8", "pipeline.group_size", "only 'kfkb'"]),
        (WHOLE.replace("num_steps: 10", "num_steps: -1"), ["line 12", "num_steps: -1 is not possible"]),
        (WHOLE + "num_epochs: 1\n", ["line 13", "num_epochs", "keep one"]),
        (WHOLE.replace("m:Model", "m.Model"), ["line 1", "model.target: 'm.Model'", "package.module:callable"]),
        (WHOLE.replace("{lr: 3e-4}", "[1]"), ["line 4", "optimizer.args: [1] is not a mapping"]),
        (WHOLE.replace("{lr: 3e-4}", "{1: 2}"), ["optimizer.args.1", "put it in quotes"]),
        (WHOLE.replace("data/train", "[a, b]"), ["line 5", "train_data: ['a', 'b']"]),
        (SMALLEST.replace("model:", "eval_data:"), ["has no model", "model: {target:"]),
        (SMALLEST.replace("train_data:", "eval_data:"), ["has no train_data"]),
        (SMALLEST + "pipeline: 3\n", ["line 6", "pipeline: 3 is not a mapping"]),
        (SMALLEST + "scaling_config: 3\n", ["line 6", "scaling_config: 3 is not a mapping"]),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(str(tmp_path / "run.yaml"))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        read_runfile(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(PipelineConfig)])
def test_every_field_of_the_pipeline_has_its_place(tmp_path: Path, name: str) -> None:
    accepted = "auto" if _ALLOWED[name].accepts("auto") else getattr(PipelineConfig(), name)
    supported = SUPPORTED.get(name) or (accepted,)
    text = to_yaml(RunFile("x", {"pipeline": {name: supported[0]}}, {}))
    assert read_runfile(written(tmp_path, SMALLEST + text)).values["pipeline"] == {name: supported[0]}
    misspelt = to_yaml(RunFile("x", {"pipeline": {f"{name}x": 1}}, {}))
    assert f"pipeline.{name}x: unknown; did you mean {name}?" in refusal(tmp_path, SMALLEST + misspelt)


def test_overrides_win_and_are_checked_like_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    run = read_runfile(path, ["pipeline.schedule=kfkb", "model.args.width=64", "optimizer.args.lr=1e-3"])
    assert run.values["pipeline"] == {"num_stages": 2, "schedule": "kfkb"}
    assert run.values["model"] == {"target": "m:Model", "args": {"width": 64}}
    assert run.values["optimizer"]["args"]["lr"] == 1e-3
    assert read_runfile(path, ["num_epochs=2"]).length == {"num_epochs": 2}
    assert read_runfile(path, ["num_epochs=2", "num_steps=null"]).length == {"num_epochs": 2}
    assert "loss_fn" not in read_runfile(path, ["loss_fn=null"]).values
    assert "--set: pipeline.shedule: unknown; did you mean schedule?" in refusal(tmp_path, WHOLE, "pipeline.shedule=x")
    assert "--set: pipeline.num_stages: num_stages=0" in refusal(tmp_path, WHOLE, "pipeline.num_stages=0")
    assert "not of the form" in refusal(tmp_path, WHOLE, "pipeline.schedule")
    assert "not of the form" in refusal(tmp_path, WHOLE, "pipeline..schedule=1")
    assert "pipeline.schedule is '1f1b' and has no keys" in refusal(tmp_path, WHOLE, "pipeline.schedule.x=1")


NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
ARGS = st.dictionaries(NAMES, st.one_of(st.integers(), st.floats(allow_nan=False), st.text("no3e-41:'\"# "), st.none()))


@pytest.mark.slow
@given(args=ARGS, width=st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_the_effective_settings_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, args: dict, width: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    text = WHOLE + to_yaml(RunFile("x", {"lr_scheduler": {"target": "m:f", "args": args}}, {}))
    run = with_name(read_runfile(written(folder, text), [f"model.args.width={width!r}"]), "unused")
    again = read_runfile(written(folder, to_yaml(run)))
    assert again.values == run.values
    assert to_yaml(again) == to_yaml(run)
    assert again.values["lr_scheduler"]["args"] == args
    assert again.values["model"]["args"]["width"] == width


def test_a_run_without_a_name_gets_one_and_keeps_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    assert with_name(read_runfile(path), "other").values["run_config"]["name"] == "lm"
    unnamed = with_name(read_runfile(path, ["run_config.name=null"]), "other")
    assert unnamed.values["run_config"]["name"] == "other"
    assert unnamed.values["run_config"]["checkpoint_config"] == {"num_to_keep": 3}


def test_a_run_of_no_length_can_be_planned_but_not_trained(tmp_path: Path) -> None:
    run = read_runfile(written(tmp_path, SMALLEST))
    with pytest.raises(ConfigError, match="add num_steps or num_epochs"):
        _ = run.length
