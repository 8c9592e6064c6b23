"""One step of PipelineTrainer, as a whole process: ``python jobs/bench/first_step/ours.py TASK FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository's root

import torch
from ray.train import RunConfig, ScalingConfig

import raypipe
from jobs.bench.first_step.tasks import optimizer_of, task_of


def main() -> None:
    """Train with everything but the mini-batch size and the number of stages left to the planner."""
    name, folder = sys.argv[1:]
    task = task_of(name)
    result = raypipe.PipelineTrainer(
        task.model,
        loss_fn=None if task.owns_loss else torch.nn.functional.cross_entropy,
        optimizer=optimizer_of,
        train_data=task.data,
        pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=task.minibatch_size),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=folder),
    ).fit(num_steps=1)
    print(f"loss {result.metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
