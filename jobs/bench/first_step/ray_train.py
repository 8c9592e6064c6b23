"""One step of Ray Train's TorchTrainer on two workers, as a whole process: ``ray_train.py TASK FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository's root

import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig

from jobs.bench.first_step.tasks import optimizer_of, task_of


def step(config: dict[str, str]) -> None:
    """Train one step on each worker: half of the mini-batch, gradients averaged by DistributedDataParallel."""
    task = task_of(config["task"])
    model = ray.train.torch.prepare_model(task.model)
    context = ray.train.get_context()
    each = task.minibatch_size // context.get_world_size()
    loader = torch.utils.data.DataLoader(task.data, batch_size=each, shuffle=True)
    optimizer = optimizer_of(model.parameters())
    batch = next(iter(ray.train.torch.prepare_data_loader(loader)))
    if task.owns_loss:
        loss = model(**batch).loss
    else:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    ray.train.report({"loss": loss.item()})


def main() -> None:
    """Run TorchTrainer as its own guide shows it."""
    name, folder = sys.argv[1:]
    ray.train.torch.TorchTrainer(
        step,
        train_loop_config={"task": name},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=folder),
    ).fit()


if __name__ == "__main__":
    main()
