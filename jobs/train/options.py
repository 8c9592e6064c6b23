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

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from raypipe import EarlyStopping, PipelineConfig, PipelineTrainer, Result
from raypipe.callbacks import MLflow, TensorBoard, WandB
from raypipe.callbacks.base import absolute
from raypipe.errors import ConfigError, RaypipeError
from raypipe.runfile.yaml_text import parse

__all__ = ["add_common", "arguments_of", "chosen", "data_folder", "exit_status", "goes_on", "train"]

SCORE = "eval_loss"

PRECISIONS = ("fp32", "bf16-autocast", "bf16", "fp16")
LOGGERS: dict[str, Callable[[], Any]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def add_common(parser: argparse.ArgumentParser, *, name: str, minibatch_size: int, learning_rate: float) -> None:
    """Add the options of every job.

    Args:
        name: prefix of the default name of a run, which the time follows.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with the names of these flags")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="optimizer steps in all, those of earlier submissions included")
    length.add_argument("--epochs", type=int, help="the same in passes over the data; 1 by default")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--minibatch-size", type=int, default=minibatch_size, help="samples per optimizer step")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--max-grad-norm", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="that stages compute in")
    parser.add_argument("--eval-interval-steps", type=int, help="steps between evaluations; one at the end without it")
    parser.add_argument("--patience", type=int, help="evaluations without a lower eval_loss that end the run")
    parser.add_argument("--checkpoint-interval-steps", type=int)
    parser.add_argument(
        "--keep-best", action="store_true", help="evaluate at every checkpoint, and take that of the lowest eval_loss"
    )
    parser.add_argument("--max-failures", type=int, default=0, help="lost stages to survive; -1 is any number")
    parser.add_argument("--logger", nargs="+", choices=LOGGERS, default=[], help="where steps are logged")
    parser.add_argument("--storage", default="runs", help="where run folders go")
    parser.add_argument(
        "--name", default=time.strftime(f"{name}-%Y%m%d-%H%M%S"), help="of the run; a name again goes on where it was"
    )
    parser.add_argument("--local", action="store_true", help="threads of this process instead of Ray actors")


def arguments_of(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse flags, with those of ``--config`` as defaults; an error ends the program with status 2."""
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
    if found.keep_best and found.checkpoint_interval_steps is None and found.eval_interval_steps is None:
        parser.error("--keep-best needs --checkpoint-interval-steps or --eval-interval-steps: how often there is one")
    return found


def _flags(parser: argparse.ArgumentParser, file: Path) -> list[str]:
    """Convert the file to flags, so that types, choices and exclusions are checked in one place."""
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


def data_folder(options: argparse.Namespace) -> str:
    """Return the data path next to the run's folder, a URI if ``--storage`` is one; all nodes must read it."""
    return f"{absolute(options.storage)}/{options.name}-data"


def train(options: argparse.Namespace, model: Any, **more: Any) -> tuple[PipelineTrainer, Result]:
    """Plan, print the plan, and train with AdamW.

    Args:
        model: in training mode.
        more: further arguments of PipelineTrainer; data and loss_fn.

    Raises:
        RaypipeError: why it failed.
    """
    import torch

    rate = options.learning_rate
    best_every = options.eval_interval_steps if options.keep_best else None
    kept = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute=SCORE, checkpoint_score_order="min")
    trainer = PipelineTrainer(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        pipeline=PipelineConfig(
            num_stages=options.stages,
            schedule=options.schedule,
            minibatch_size=options.minibatch_size,
            num_microbatches=options.microbatches,
            max_grad_norm=options.max_grad_norm,
            precision=options.precision,
            eval_interval_steps=options.eval_interval_steps,
            checkpoint_interval_steps=options.checkpoint_interval_steps or best_every or "auto",
            seed=options.seed,
        ),
        scaling_config=ScalingConfig(num_workers=options.stages),
        run_config=RunConfig(
            name=options.name,
            storage_path=absolute(options.storage),
            failure_config=FailureConfig(max_failures=options.max_failures),
            checkpoint_config=kept if options.keep_best else None,
        ),
        early_stopping=None if options.patience is None else EarlyStopping(SCORE, patience=options.patience),
        callbacks=[LOGGERS[name]() for name in options.logger],
        **more,
    )
    print(trainer.plan())
    length = {"num_steps": options.steps} if options.epochs is None else {"num_epochs": options.epochs}
    result = trainer.fit(**length, local=options.local)
    numbers = (f"{key} {result.metrics[key]:.4f}" for key in result.metrics if key == "loss" or key.startswith("eval_"))
    print(f"step {len(result.records)}  {'  '.join(numbers)}")
    if result.stopped:
        print(f"stopped      {result.stopped}{'; the same command goes on from there' * goes_on(options, result)}")
    print(f"run folder   {result.path}\ncheckpoint   {chosen(options, result)}")
    return trainer, result


def goes_on(options: argparse.Namespace, result: Result) -> bool:
    """Return True if the run was stopped before its end. With --patience an early end may be final."""
    if options.patience is None:
        return bool(result.stopped)
    of_interval = [record for record in result.records if (record.step + 1) % options.eval_interval_steps == 0]
    scores = [dict(record.evaluation)[SCORE] for record in of_interval if record.evaluation]
    return result.stopped not in ("", EarlyStopping(SCORE, patience=options.patience).verdict(scores))


def chosen(options: argparse.Namespace, result: Result) -> str:
    """Return the checkpoint to use: the last one, or with --keep-best that of the lowest eval_loss."""
    return result.get_best_checkpoint(SCORE, "min") if options.keep_best else result.checkpoint


def exit_status(main: Callable[[], int]) -> int:
    """Return what ``main`` returns, or 1 and the reason on standard error if the run, a file or a folder is wrong."""
    try:
        return main()
    except (RaypipeError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
