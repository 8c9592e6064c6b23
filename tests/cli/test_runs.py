"""The command line on real runs: a YAML file trains, on threads and on a cluster, and what it leaves can be used."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, load_model
from typer.testing import CliRunner

import raypipe
from raypipe.api.from_file import make_trainer
from raypipe.cli import app
from raypipe.errors import ConfigError
from raypipe.run.lease import LOCK
from raypipe.runfile.run_file import read_runfile
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.worker.places import NAMESPACE
from tests import processes
from tests.exactness import same_bits
from tests.hugging_face import _gpt2
from tests.runtime.raylets import Home

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "jobs/train/text_lm.yaml"
SMALL = [
    "model.args.width=16", "model.args.depth=2", "model.args.context=16", "pipeline.minibatch_size=8",
    "pipeline.num_microbatches=2", "num_steps=3",
    *(f"{data}.args.{key}={value}" for data in ("train_data", "eval_data")
      for key, value in (("context", 16), ("corpus_bytes", "2e5"))),
]  # fmt: skip

# Targets live beside the file, in the working directory.
TASK = """\
import torch

NOT_CALLABLE = 3

class Net(torch.nn.Sequential):
    def __init__(self, width, depth=1):
        super().__init__(torch.nn.Linear(4, width), *[torch.nn.Linear(width, width) for _ in range(depth)])

class Wide(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 40_000), torch.nn.Linear(40_000, 4))

def data(count):
    drawn = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*torch.randn(2, count, 4, generator=drawn))

def halve(optimizer, every):
    return torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)
"""
CONFIG = """\
model: {target: "task:Net", args: {width: 4}}
loss_fn: {target: "torch.nn:MSELoss"}
optimizer: {target: "torch.optim:SGD", args: {lr: 1e-1}}
lr_scheduler: {target: "task:halve", args: {every: 2}}
train_data: {target: "task:data", args: {count: 32}}
pipeline: {num_stages: 2, minibatch_size: 8, num_microbatches: 2, seed: 3}
scaling_config: {num_workers: 2}
run_config: {name: NAME, storage_path: runs}
num_steps: 6
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run file in it; sys.path is put back afterwards."""
    # A module's name must be new to this process, so it is that of the folder.
    name = f"task_{tmp_path.name}".replace("-", "_").replace("[", "_").replace("]", "_")
    (tmp_path / f"{name}.py").write_text(TASK)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("task:", f"{name}:").replace("NAME", tmp_path.name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def program(folder: Path, *arguments: object, **environment: str) -> str:
    """Output of the command as a process of its own, as a person runs it."""
    run = subprocess.run(
        [sys.executable, "-m", "raypipe.cli", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def cli(*arguments: object) -> str:
    """Output of the command in this process, which has imported everything already."""
    run = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert run.exit_code == 0, run.output
    return run.stdout


def test_the_sample_trains(tmp_path: Path) -> None:
    """Where no Ray runs: it starts one, which is gone afterwards."""
    known = set(processes.descendants(os.getpid()))
    overrides = [word for override in SMALL for word in ("--set", override)]
    out = program(tmp_path, "train", SAMPLE, *overrides, PYTHONPATH=str(ROOT))
    assert processes.survivors(os.getpid(), known, 10.0) == {}
    assert out.startswith("stages:  2. Stage 0: ")
    assert "eval_loss" in out
    run = tmp_path / "runs/text_lm"
    assert f"run folder   {run}" in out
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "plan.json", "metrics.parquet", "events.jsonl", "timeline", "checkpoints"} <= names


def test_the_same_settings_train_the_same_bits_from_the_file_from_its_copy_and_in_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("train", "run.yaml", "--local", "--set", "optimizer.args.lr=5e-2")
    run = folder / "runs" / folder.name
    # The copy in the run's folder is the whole truth: paths are absolute, overrides are in it.
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    cli("train", run / "config.yaml", "--local", "--set", "run_config.name=again")
    monkeypatch.chdir(folder)
    settings = read_runfile("run.yaml", ["run_config.name=python", "optimizer.args.lr=0.05"])
    make_trainer(settings).fit(**settings.length, local=True, progress=False)
    first, *others = (raypipe.load_state_dict(run.with_name(name)) for name in (folder.name, "again", "python"))
    for other in others:
        assert first.keys() == other.keys()
        assert all(same_bits(first[name], other[name]) for name in first)


def test_plan_and_simulate_start_nothing(folder: Path) -> None:
    assert cli("plan", "run.yaml").startswith("stages:  2. Stage 0: ")
    plan = json.loads(cli("plan", "run.yaml", "--json", "--set", "pipeline.schedule=gpipe"))
    assert plan["schedule"]["kind"] == "gpipe"
    assert cli("simulate", "run.yaml", "--trace", "trace.json", "--svg", "picture.svg").startswith("predicted: ")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert not (folder / "runs").exists()


@pytest.fixture
def cluster(head: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """RAY_ADDRESS names it."""
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    try:
        yield
    finally:
        ray.shutdown()  # status and stop stay connected in this process


def test_a_detached_run_is_watched_stopped_and_exported(folder: Path, cluster: None) -> None:
    name = folder.name
    out = program(folder, "train", "run.yaml", "--detach", "--set", "num_steps=1000000")
    assert f"run {name} in {folder / 'runs' / name}" in out
    deadline_s = time.monotonic() + 300
    while (now := json.loads(cli("status", name, "--json")))["step"] < 2:
        assert time.monotonic() < deadline_s, now
    assert (now["state"], now["num_steps"]) == ("running", 1_000_000)
    assert f"{name}: running, step" in cli("status", f"runs/{name}")
    assert f"{name} stops" in cli("stop", name)
    while not (out := cli("status", f"runs/{name}")).startswith(f"{name}: stopped; raypipe stop"):
        assert time.monotonic() < deadline_s, out
        time.sleep(0.05)
    cli("trace", f"runs/{name}", "-o", "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["traceEvents"]
    (folder / "runs" / name / "timeline/trace.json").unlink()  # then it is made again of the spans
    cli("trace", f"runs/{name}", "-o", "again.json")
    again = json.loads((folder / "again.json").read_text())
    assert len([e for e in again["traceEvents"] if e["ph"] == "X"]) == len(
        [e for e in trace["traceEvents"] if e["ph"] == "X"]
    )
    cli("export", f"runs/{name}", "--to", "safetensors", "-o", "model.safetensors")
    exported, state = load_file(folder / "model.safetensors"), raypipe.load_state_dict(folder / "runs" / name)
    assert exported.keys() == state.keys()
    assert all(same_bits(exported[key], state[key]) for key in state)
    # Its driver would answer for a minute more, and the session may end before that.
    ray.kill(ray.get_actor(driver_name(name), namespace=NAMESPACE), no_restart=True)


LEAVES = """\
import os, signal, sys
from raypipe.api.from_file import make_trainer
from raypipe.runfile.run_file import read_runfile
handle = make_trainer(read_runfile("run.yaml", sys.argv[1:])).start(6, detached=True)
print(handle.status().state, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_begins_in_the_driver_after_its_client_was_killed(folder: Path, cluster: None) -> None:
    """Its parameters lie in the object store, where things die with the process that put them there."""
    name, module = folder.name, next(path.stem for path in folder.glob("task_*.py"))
    wide = [f"model.target={module}:Wide", "model.args={}", "optimizer.args.lr=1e-5"]
    lock = folder / "runs" / name / LOCK
    lock.parent.mkdir(parents=True)
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the driver takes the lease before it begins, and waits for this
        client = subprocess.run(
            [sys.executable, "-c", LEAVES, *wide], cwd=folder, capture_output=True, text=True, timeout=200, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        )  # fmt: skip
        assert (client.returncode, client.stdout) == (-signal.SIGKILL, "starting\n"), client.stderr
        assert not (lock.parent / "plan.json").exists()
    trained = raypipe.attach(name).wait().records
    settings = read_runfile("run.yaml", [*wide, "run_config.name=local"])
    alone = make_trainer(settings).fit(6, local=True, progress=False)
    assert [record.loss for record in trained] == [record.loss for record in alone.records]
    found, wanted = (raypipe.load_state_dict(folder / "runs" / run) for run in (name, "local"))
    assert all(same_bits(found[key], wanted[key]) for key in wanted)
    ray.kill(ray.get_actor(driver_name(name), namespace=NAMESPACE), no_restart=True)


def test_a_run_that_nobody_knows_is_named(folder: Path, cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for verb in (["status", "nobody"], ["stop", "nobody"], ["trace", "nobody", "-o", "x"]):
        with pytest.raises(ConfigError, match="No run named 'nobody'"):
            cli(*verb)


def test_a_hugging_face_model_comes_back_from_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "run.yaml").write_text(
        'model: {target: "tests.hugging_face:_gpt2", args: {tied: true}}\n'
        'optimizer: {target: "torch.optim:AdamW", args: {lr: 1e-2}}\n'
        'train_data: {target: "tests.hugging_face:_sentences", args: {count: 16}}\n'
        "pipeline: {num_stages: 2, minibatch_size: 8, num_microbatches: 2}\n"
        "run_config: {name: gpt2, storage_path: runs}\nnum_steps: 2\n"
    )
    cli("train", "run.yaml", "--local")
    model = _gpt2(True)
    model.config.save_pretrained(tmp_path / "config")
    out = cli("export", "runs/gpt2", "--to", "hf", "-o", "hf", "--config", "config")
    assert "lm_head.weight is transformer.wte.weight, which is stored once" in out
    cli("export", "runs/gpt2", "-o", "one.safetensors")
    state = raypipe.load_state_dict(tmp_path / "runs/gpt2")
    load_model(model, tmp_path / "one.safetensors")  # strict: nothing is missing, nothing is left over
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").state_dict()
    for found in (model.state_dict(), loaded):
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.target=MODULE:Nets", ["model.target.Nets: unknown; did you mean Net?"]),
        ("model.target=no_such_module:Net", ["model.target: there is no module no_such_module", "PYTHONPATH"]),
        ("model.target=MODULE:NOT_CALLABLE", ["model.target", "is int, which cannot be called"]),
        ("model.args.widht=3", ["model.args.widht: unknown; did you mean width?"]),
        ("model.args=null", ["model: MODULE:Net", "missing a required argument: 'width'"]),
        ("optimizer.args.learning_rate=1", ["optimizer.args.learning_rate: unknown"]),
        ("optimizer.args.params=1", ["optimizer: torch.optim:SGD", "multiple values for argument 'params'"]),
        ("scaling_config.num_worker=2", ["scaling_config.num_worker: unknown; did you mean num_workers?"]),
        ("scaling_config.num_workers=two", ["scaling_config.num_workers: 'two': it is the number of places"]),
        ("run_config.name=7", ["run_config.name: 7: it is the name of one folder"]),
        ("run_config.verbose=1", ["run_config.verbose: unknown"]),
        ("run_config.callbacks=[]", ["run_config.callbacks: unknown"]),
        ("run_config.checkpoint_config.num_to_kep=1", ["checkpoint_config.num_to_kep: unknown; did you mean num_to_k"]),
        ("run_config.checkpoint_config.num_to_keep=0", ["run_config.checkpoint_config.num_to_keep: 0: give an int"]),
        ("scaling_config.use_gpu=7", ["scaling_config.use_gpu: 7"]),
        ("scaling_config.num_workers=[8, 2]", ["scaling_config.num_workers: [8, 2]: a pair is the least and the most"]),
        ("run_config.failure_config.max_failures=-2", ["run_config.failure_config.max_failures: -2: it is the number"]),
        ("run_config.failure_config={max_failures: many}", ["run_config.failure_config.max_failures: 'many'"]),
    ],
)
def test_what_only_an_import_can_tell_is_named_too(folder: Path, override: str, words: list[str]) -> None:
    module = next(path.stem for path in folder.glob("task_*.py"))
    with pytest.raises(ConfigError) as caught:
        make_trainer(read_runfile(folder / "run.yaml", [override.replace("MODULE", module)]))
    if "no effect" in str(caught.value) or "a pair" in str(caught.value):
        with pytest.raises(ConfigError) as planned:
            make_trainer(read_runfile(folder / "run.yaml", [override]), planning=True)
        assert str(planned.value) == str(caught.value)
    message = str(caught.value)
    assert message.startswith(str(folder / "run.yaml"))
    assert "\n" not in message
    for word in words:
        assert word.replace("MODULE", module) in message
