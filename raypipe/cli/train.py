"""``raypipe train CONFIG.yaml``."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import typer

from raypipe.cli.common import ConfigFile, Overrides, open_runfile, trainer_of

__all__ = ["train"]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    local: Annotated[bool, typer.Option("--local", help="threads of this process instead of Ray actors")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="start it on the cluster and return at once")] = False,
) -> None:
    """Train to the end, or until the run is stopped.

    With --detach the run outlives this command; that needs a cluster, which RAY_ADDRESS names.
    """
    if local and detach:
        raise typer.BadParameter("a run in threads of this process cannot outlive it: leave one of the two out.")
    from raypipe.runfile.read import with_name

    name = f"raypipe-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run = with_name(open_runfile(config, overrides), name)
    length = run.length
    trainer = trainer_of(run)
    typer.echo(trainer.plan())
    if detach:
        handle = trainer.start(**length, detached=True)
        typer.echo(f"run {handle.name} in {handle.path}\nfollow it with: raypipe status {handle.name}")
        return
    result = trainer.fit(**length, local=local)
    numbers = (f"{key} {result.metrics[key]:.4f}" for key in result.metrics if key == "loss" or key.startswith("eval_"))
    typer.echo(f"step {len(result.records)}  {'  '.join(numbers)}")
    if result.stopped:
        typer.echo(f"stopped      {result.stopped}")
    typer.echo(f"run folder   {result.path}\ncheckpoint   {result.checkpoint}")
