"""Flags that training jobs share, and the same names in a YAML file.

python jobs/train/vision.py --steps 300 --stages 3
python jobs/train/vision.py --config digits.yaml --stages 3       a flag wins over the file

# digits.yaml
steps: 300
learning-rate: 1e-3
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig

from raypipe import PipelineConfig, PipelineTrainer, Result
from raypipe.callbacks import MLflow, TensorBoard, WandB
from raypipe.callbacks.base import absolute
from raypipe.errors import ConfigError, RaypipeError
from raypipe.runfile.yaml_text import parse

__all__ = ["add_common", "arguments_of", "data_folder", "exit_status", "train"]

LOGGERS: dict[str, Callable[[], Any]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def add_common(parser: argparse.ArgumentParser, *, name: str, minibatch_size: int, learning_rate: float) -> None:
    """What every job has, whatever it trains.

    Args:
        name: that a run has with the time behind it where none is given.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with the names of these flags")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="optimizer steps in all, those of earlier submissions included")
    length.add_argument("--epochs", type=int, help="the same in passes over the data; 1 where nothing is said")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--minibatch-size", type=int, default=minibatch_size, help="samples per optimizer step")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--max-grad-norm", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-interval-steps", type=int)
    parser.add_argument("--max-failures", type=int, default=0, help="lost stages to survive; -1 is any number")
    parser.add_argument("--logger", nargs="+", choices=LOGGERS, default=[], help="where steps are logged")
    parser.add_argument("--storage", default="runs", help="where run folders go")
    parser.add_argument(
        "--name", default=time.strftime(f"{name}-%Y%m%d-%H%M%S"), help="of the run; a name again goes on where it was"
    )
    parser.add_argument("--local", action="store_true", help="threads of this process instead of Ray actors")


def arguments_of(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags, and below them those of ``--config``; what is wrong ends the program with status 2."""
    words = list(sys.argv[1:] if given is None else given)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    file = first.parse_known_args(words)[0].config
    parser.allow_abbrev = False  # --conf would be taken for --config, and its file not be read
    found = parser.parse_args([*([] if file is None else _flags(parser, file)), *words])
    if found.steps is None and found.epochs is None:
        found.epochs = 1
    if found.checkpoint_interval_steps is not None and found.checkpoint_interval_steps < 1:
        parser.error("--checkpoint-interval-steps is 1 or more; without it raypipe finds an interval")
    return found


def _flags(parser: argparse.ArgumentParser, file: Path) -> list[str]:
    """The file as flags, so that types, choices and what excludes what are looked at in one place."""
    try:
        values, _ = parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        parser.error(f"--config {file}: {error}")
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    words: list[str] = []
    for key, value in values.items():
        flag = f"--{str(key).replace('_', '-')}"
        if flag not in known or flag in ("--config", "--help"):
            close = difflib.get_close_matches(flag, known, n=1)
            parser.error(f"--config {file}: {key} is unknown{f'; did you mean {close[0][2:]}?' if close else ''}")
        if known[flag].nargs == 0:
            if not isinstance(value, bool):
                parser.error(f"--config {file}: {key} is true or false, not {value!r}")
            words += [flag] * value
        elif value is not None and value != []:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


def data_folder(asked: argparse.Namespace) -> str:
    """Beside the run's folder, a URI where ``--storage`` is one; every node must be able to read it."""
    return f"{absolute(asked.storage)}/{asked.name}-data"


def train(asked: argparse.Namespace, model: Any, **more: Any) -> tuple[PipelineTrainer, Result]:
    """Plan, print the plan, and train with AdamW.

    Args:
        model: in training mode.
        more: further arguments of PipelineTrainer; data and loss_fn.

    Raises:
        RaypipeError: why it failed.
    """
    import torch

    rate = asked.learning_rate
    trainer = PipelineTrainer(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        pipeline=PipelineConfig(
            num_stages=asked.stages,
            schedule=asked.schedule,
            minibatch_size=asked.minibatch_size,
            num_microbatches=asked.microbatches,
            max_grad_norm=asked.max_grad_norm,
            checkpoint_interval_steps=asked.checkpoint_interval_steps or "auto",
            seed=asked.seed,
        ),
        scaling_config=ScalingConfig(num_workers=asked.stages),
        run_config=RunConfig(
            name=asked.name,
            storage_path=absolute(asked.storage),
            failure_config=FailureConfig(max_failures=asked.max_failures),
        ),
        callbacks=[LOGGERS[name]() for name in asked.logger],
        **more,
    )
    print(trainer.plan())
    length = {"num_steps": asked.steps} if asked.epochs is None else {"num_epochs": asked.epochs}
    result = trainer.fit(**length, local=asked.local)
    numbers = (f"{key} {result.metrics[key]:.4f}" for key in result.metrics if key == "loss" or key.startswith("eval_"))
    print(f"step {len(result.records)}  {'  '.join(numbers)}")
    if result.stopped:
        print(f"stopped      {result.stopped}; the same command goes on from there")
    print(f"run folder   {result.path}\ncheckpoint   {result.checkpoint}")
    return trainer, result


def exit_status(main: Callable[[], int]) -> int:
    """What ``main`` returns, or 1 and the reason on standard error where the run, a file or a folder is wrong."""
    try:
        return main()
    except (RaypipeError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
