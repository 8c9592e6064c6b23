"""Process of a stage actor: device, allocator, and folders that it shares with the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

from raypipe import PipelineTrainer, load_state_dict
from raypipe.engine.device.device import Device
from raypipe.errors import ConfigError
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.worker.stage_process import index_of, keep_freed_memory
from tests import nets, processes
from tests.exactness import unequal
from tests.fake_device import FakeDevice
from tests.models import vectors
from tests.runtime.on_fleet import start_on
from tests.runtime.raylets import TOKEN, private_cluster
from tests.trainers import adamw, trainer_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


HALF = {"CPU": 0.0, "GPU": 0.5, "spare": 0.1}
STEPS = 4


@pytest.mark.parametrize(
    ("ids", "visible", "index"),
    [
        (["2"], "2", 0),
        (["3"], "2, 3", 1),  # Ray was told not to change what is visible, and its nodes show some GPUs only
        (["1"], None, 1),  # the same, and they show all
        (["GPU-5a"], "GPU-77,GPU-5a", 1),
        (["GPU-5a"], None, None),
        (["2"], "", None),
        ([], "0", None),
    ],
)
def test_a_gpu_is_found_among_those_that_torch_sees(ids: list[str], visible: str | None, index: int | None) -> None:
    assert index_of(ids, visible) == index


def pretended(share: float) -> Device:
    """A device that says which GPU this process would see."""
    device = FakeDevice(eager=False)
    device.title = f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}"
    device.memory_bytes = int(share * 1024)
    return device


def trained(folder: Path, name: str) -> PipelineTrainer:
    torch.manual_seed(0)
    return trainer_of(nets.sequential(), folder, name, optimizer=adamw, train_data=vectors(32), num_stages=3)


def test_workers_share_gpus_and_compute_the_bits_of_the_cpu(local_ray: None, tmp_path: Path) -> None:
    """State, snapshots and copies lie on the device; those who read them wait, or their bits would be others."""
    fleet = Fleet(3, Terms(HALF, device_of=pretended))
    try:
        seen = [facts["device"] for facts in fleet.facts]
        assert len(set(seen)) == 2  # the third has a GPU of its own
        assert set(seen) <= {f"GPU {number}" for number in range(4)}
        assert [facts["device_bytes"] for facts in fleet.facts] == [512] * 3
        handle = start_on(fleet, trained(tmp_path, "late"), STEPS)
        found = load_state_dict(handle.wait().checkpoint)
        fleet.keep_copy(STEPS)
        assert {step for _, facts in fleet.copies() for step in facts.steps} == {STEPS}
        for actor, facts in fleet.copies():
            if not facts.held:
                header = ray.get(actor.copy_header.remote(facts.generation, facts.stage, STEPS))
                assert b'"step"' in header
    finally:
        fleet.stop()
    alone = trained(tmp_path, "alone").fit(STEPS, local=True, progress=False)
    wanted = load_state_dict(alone.checkpoint)
    assert unequal(found, wanted) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_on_which_torch_cannot_compute_is_named(local_ray: None) -> None:
    with pytest.raises(ConfigError, match=r"ScalingConfig\(use_gpu=True\): Ray gave a worker on .* a GPU") as caught:
        Fleet(1, Terms(HALF))
    assert "torch" in str(caught.value)
    assert "use_gpu=False" in str(caught.value)


CHURN = """
import json, resource, sys, threading
import torch
from raypipe.runtime.worker.stage_process import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
found = []

def work():  # as stages do, in another thread than the first
    for turn in range(20):
        if turn == 10:
            found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
        held = [torch.ones(size << 20) for size in (1, 3, 2, 6, 1)]
        del held
    found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps([kept, found[1] - found[0]]))
"""


def churned(how: str) -> tuple[bool, int]:
    """Whether memory is kept, and pages that were entered anew while 52 MiB were taken and given back ten times."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", CHURN, how], env=plain, capture_output=True, text=True, timeout=120, check=True
    )
    kept, pages = json.loads(done.stdout.splitlines()[-1])
    return kept, pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_what_was_freed_is_not_entered_anew() -> None:
    kept, pages = churned("keep")
    if not kept:
        pytest.skip("another allocator than glibc's")
    _, before = churned("leave")
    assert pages < before / 10


def test_what_the_environment_says_stays() -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        assert not keep_freed_memory({name: "1"})


SCRIPT = """
import json
import sys
from pathlib import Path

import numpy as np
import torch
from ray.train import RunConfig, ScalingConfig

import raypipe


class Files:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.from_numpy(np.load(f"data/{index}.npy")), torch.tensor(index % 2)


class Note(raypipe.Callback):
    def on_end(self, end):
        Path("ended.txt").write_text(str(end.step))


def train(name, stages, storage, **more):
    trainer = raypipe.PipelineTrainer(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
        loss_fn=torch.nn.functional.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=Files(), callbacks=[Note()], scaling_config=ScalingConfig(num_workers=stages, **more),
        pipeline=raypipe.PipelineConfig(num_stages=stages, minibatch_size=8, num_microbatches=2),
        run_config=RunConfig(name=name, storage_path=storage),
    )
    try:
        return trainer.fit(num_steps=2, progress=False).path
    except raypipe.errors.RaypipeError as error:
        return str(error)


Path("data").mkdir()
for index in range(16):
    np.save(f"data/{index}.npy", np.full(4, index, np.float32))
beside = {"resources_per_worker": {"CPU": 1, "driver": 1}}
found = {"one": train("one", 1, "runs", **beside), "ended": Path("ended.txt").exists()}
found |= {"two": train("two", 2, sys.argv[1]), "apart": train("apart", 2, "runs")}
print("\\n" + json.dumps(found))
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_relative_paths_start_from_the_scripts_folder_and_a_node_without_it_is_named(tmp_path: Path) -> None:
    """The second node has an empty disk of its own where the script and its data are."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    (own / "work").mkdir(parents=True)
    apart = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs {own} && exec "$@"', "sh")
    with private_cluster() as home:
        home.start(cpus=1, options=["--resources", '{"driver": 1}'], **TOKEN)
        home.start(*apart, cpus=1, **TOKEN)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(shared)], cwd=own / "work", capture_output=True, text=True, timeout=500,
            env={**os.environ, **TOKEN, "RAY_ADDRESS": home.address}, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = processes.said_last(done.stdout)
    assert (found["one"], found["ended"]) == (str(own / "work" / "runs" / "one"), True)
    two = found["two"]
    assert "of Files cannot be read" in two
    assert "No such file or directory: 'data/" in two
    assert f"The working directory was {Path.cwd()} on {os.uname().nodename}." in two
    assert "give an absolute path" in two
    assert "Mend the item" not in two
    assert f"The run's folder {own}/work/runs/apart on node " in found["apart"]
    assert "storage_path that all nodes share" in found["apart"]
