"""``raypipe init``: a run file that trains as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["init"]


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to write; made if need be")] = Path(),
) -> None:
    """Write run.yaml and model.py, which train as they stand. No file is replaced."""
    from raypipe.starter import write

    for path in write(folder):
        typer.echo(f"wrote {path}")
    if folder != Path():
        typer.echo(f"  cd {folder}")
    typer.echo("  raypipe plan run.yaml             # what will run, and why")
    typer.echo("  raypipe train run.yaml --local    # in threads; without --local on Ray")
