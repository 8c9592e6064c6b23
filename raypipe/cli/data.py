"""``raypipe data``: the first mini-batch of a run, as its stages will read it."""

from __future__ import annotations

import typer

from raypipe.cli.common import ConfigFile, Overrides, open_runfile, trainer_of

__all__ = ["data"]


def data(config: ConfigFile, overrides: Overrides = None) -> None:
    """Show the first batch of train_data and of eval_data: columns, shapes, types, ranges, first values.

    The data is opened, shuffled and collated as a run does it. The model is neither built nor run.
    """
    from raypipe.api.first_batch import first_batches

    run = open_runfile(config, overrides)
    for text in first_batches(trainer_of(run, planning=True)):
        typer.echo(text)
