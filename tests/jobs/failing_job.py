"""A job whose stage 1 raises in its sixth micro-batch; submitted by test_lm.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from raypipe import PipelineConfig, PipelineTrainer
from tests.mishaps import Fuse, chain
from tests.models import CASES

if __name__ == "__main__":
    torch.manual_seed(0)
    PipelineTrainer(
        chain(2, 1, Fuse("B", 5)),
        loss_fn=torch.nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        train_data=CASES["mlp"].data(32),
        # Checked, it would raise before the run begins.
        pipeline=PipelineConfig(partitioner=["2"], minibatch_size=8, num_microbatches=4, verify="off"),
        run_config=SimpleNamespace(name="failing", storage_path=sys.argv[1]),
    ).fit(num_steps=4, progress=False)
