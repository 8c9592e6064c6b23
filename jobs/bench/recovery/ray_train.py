"""Ray Train's elastic TorchTrainer as its own guide shows it: ``ray_train.py MEGABYTES FOLDER``, until it is ended."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository's root

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

from jobs.bench.recovery.peer_net import data_of, model_of, say_step

CHECKPOINT_EVERY = 10


def train(config: dict[str, Any]) -> None:
    """Train on each worker."""
    torch.set_num_threads(1)
    plain, width = model_of(config["megabytes"])
    model = ray.train.torch.prepare_model(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rank, step = ray.train.get_context().get_world_rank(), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        x, y = data_of(width, step)
        loss = (model(x)[:, 0] - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        say_step(Path(config["file"]), rank, step)
        if step % CHECKPOINT_EVERY:
            continue
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if rank == 0:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, Path(folder) / "state.pt")
                kept = Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=kept)


def main() -> None:
    """Train on two workers, or one if there is no place for the second."""
    megabytes, folder = float(sys.argv[1]), Path(sys.argv[2])
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"megabytes": megabytes, "file": str(folder / "steps")},
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(name="peer", storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main()
