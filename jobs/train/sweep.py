"""Sweep learning rates with Ray Tune: a small image classifier on scikit-learn's digits, each rate a run of its own.

    python jobs/train/sweep.py                              five rates, two runs at a time, the worst are stopped early
    python jobs/train/sweep.py --rates 1e-3 1e-2 --steps 100
    ray job submit --working-dir . -- python jobs/train/sweep.py --storage /shared/runs

Ray Tune starts the trials and its ASHA scheduler stops those that fall behind; a trial that is stopped leaves neither
actors nor places (docs/design/0024). As many runs train at once as the cluster has CPUs for. Prints a row for each rate
and the best of them; exits with 1 if no run succeeded.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.schedulers import ASHAScheduler

import raypipe
from raypipe.callbacks.base import absolute

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.common import table
from jobs.train.images import read_images, write_split
from jobs.train.vision import Net, loss_fn


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; return exit status 0 if at least one run succeeded."""
    options = parse(arguments)
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR")
    found = sweep(options)
    rows = [row_of(one) for one in found]
    print(table("learning rates", ("rate", "steps", "loss", "eval_loss", "what became of it"), rows))
    good = [one for one in found if one.error is None]
    if not good:
        return 1
    best = found.get_best_result(filter_nan_and_inf=True)
    print(f"best rate    {best.config['rate']:g}\nrun folder   {best.metrics['path']}")
    return 0


def sweep(options: argparse.Namespace) -> tune.ResultGrid:
    """Run all trials."""
    make = trainers(options)
    at_once = options.at_once or max(1, int(ray.cluster_resources().get("CPU", 1)) // options.stages)
    tuner = tune.Tuner(
        raypipe.tune.trainable(make, options.steps, options.interval),
        param_space={"rate": tune.grid_search(options.rates)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            max_concurrent_trials=at_once,
            scheduler=ASHAScheduler(
                time_attr="step", max_t=options.steps, grace_period=options.interval, reduction_factor=2
            ),
        ),
        run_config=tune.RunConfig(name=options.name, storage_path=absolute(options.storage), verbose=0),
    )
    return tuner.fit()


def trainers(options: argparse.Namespace) -> Callable[[dict[str, Any], str], raypipe.PipelineTrainer]:
    """Write the data, and return what makes the trainer of a trial of its config and its name."""
    images, folder = read_images(None, 8), f"{absolute(options.storage)}/{options.name}-data"
    data = {name: write_split(split, f"{folder}/{name}.parquet") for name, split in images.splits.items()}
    shape = (images.channels, images.size, len(images.classes))

    def make(config: dict[str, Any], name: str) -> raypipe.PipelineTrainer:
        torch.manual_seed(options.seed)
        return raypipe.PipelineTrainer(
            Net(*shape, options.width, options.depth),
            loss_fn=loss_fn,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=config["rate"]),
            train_data=data["train"],
            eval_data=data["heldout"],
            pipeline=raypipe.PipelineConfig(
                num_stages=options.stages,
                minibatch_size=64,
                num_microbatches=4,
                partitioner="parameters",
                seed=options.seed,
            ),
            scaling_config=ScalingConfig(num_workers=options.stages),
            run_config=RunConfig(name=name, storage_path=absolute(options.storage)),
        )

    return make


def row_of(result: Any) -> tuple[Any, ...]:
    """Format a trial as a row."""
    metrics, rate = result.metrics or {}, (result.config or {}).get("rate", math.nan)  # before its first report
    if result.error is not None:
        became = f"failed: {str(result.error).strip().splitlines()[-1][:100]}"
    else:
        became = "trained to the end" if "eval_loss" in metrics else "stopped early"
    return (f"{rate:g}", *(metrics.get(name, "--") for name in ("step", "loss", "eval_loss")), became)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; the defaults take a few minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-3, 3e-3, 1e-2, 1e-1])
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a run that is not stopped")
    parser.add_argument("--interval", type=int, default=20, help="steps between two reports")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--at-once", type=int, help="runs that train at once; as many as there are CPUs for")
    parser.add_argument("--width", type=int, default=16, help="channels, a multiple of 4")
    parser.add_argument("--depth", type=int, default=2, help="residual blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="sweep")
    parser.add_argument("--storage", default="runs", help="where run folders go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
