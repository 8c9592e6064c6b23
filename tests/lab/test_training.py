"""A pipeline over a shaped link: two raylets with a token in two namespaces, one stage on each."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch
from torch import nn

from raypipe.config import PipelineConfig
from raypipe.trainer import PipelineTrainer
from tests.lab.network import ROOT, network
from tests.runtime.raylets import private_cluster

pytestmark = [pytest.mark.net, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
RATE_MBIT = 50.0
STEPS, MICROBATCHES, SAMPLES, WIDTH = 3, 4, 256, 512


def run(storage: str, *, local: bool) -> list[float]:
    """Train three steps of a small model; the losses."""
    from ray.train import RunConfig

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))
    drawn = torch.Generator().manual_seed(4)
    x = torch.randn(SAMPLES * STEPS, 16, generator=drawn)
    y = torch.randn(SAMPLES * STEPS, 4, generator=drawn)
    trainer = PipelineTrainer(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=torch.utils.data.TensorDataset(x, y),
        # The cut is behind the first Tanh: SAMPLES x WIDTH floats a step each way.
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=SAMPLES, num_microbatches=MICROBATCHES, schedule="1f1b", partitioner=("2",)
        ),
        run_config=RunConfig(name="local" if local else "ray", storage_path=storage),
    )
    result = trainer.fit(num_steps=STEPS, local=local)
    return [float(loss) for loss in result.metrics_dataframe["loss"]]


DRIVER = """
import json, sys, ray
from tests.lab.test_training import run
head, port, storage = sys.argv[1:]
ray.init(address=f"{head}:{port}", _node_ip_address=head, log_to_driver=False)
losses = run(storage, local=False)
print(json.dumps(losses))
"""


def test_two_stages_train_over_a_shaped_link(tmp_path: object) -> None:
    folder = str(tmp_path)
    with network() as lab, private_cluster(lab.addresses[0]) as home:
        home.start(*lab.prefix(0), PYTHONPATH=str(ROOT), **TOKEN)
        home.start(*lab.prefix(1), at=lab.addresses[1], PYTHONPATH=str(ROOT), **TOKEN)
        lab.rate(0, 1, RATE_MBIT)
        before = [lab.carried_bytes(0, 1), lab.carried_bytes(1, 0)]
        driver = lab.python(
            0, "-c", DRIVER, home.head, str(home.port), folder,
            env={**os.environ, **TOKEN}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        said, _ = driver.communicate(timeout=120)
        carried = [lab.carried_bytes(0, 1) - before[0], lab.carried_bytes(1, 0) - before[1]]
    assert driver.returncode == 0
    losses = json.loads(said.splitlines()[-1])
    assert losses == run(folder, local=True), "the same bits as without a network"
    boundary_bytes = 4 * SAMPLES * WIDTH * STEPS
    assert min(carried) > boundary_bytes, "a stage on each host"
