"""``raypipe export CHECKPOINT --to safetensors -o FILE`` and ``--to hf -o FOLDER``.

raypipe export RUN -o FILE                              the newest checkpoint of a run
raypipe export RUN -o FILE --best eval_loss --mode min  the best of those that were kept
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.common import known_folder

__all__ = ["export"]


class Form(StrEnum):
    """What others read."""

    SAFETENSORS = "safetensors"
    HF = "hf"


class Mode(StrEnum):
    """Which of two numbers is the better one."""

    MAX = "max"
    MIN = "min"


def export(
    checkpoint: Annotated[str, typer.Argument(help="folder or URI of a checkpoint, or a run for its newest one")],
    output: Annotated[Path, typer.Option("-o", "--output", help="a file for safetensors, a new folder for hf")],
    to: Annotated[Form, typer.Option(help="one file, or a folder for from_pretrained")] = Form.SAFETENSORS,
    config: Annotated[Path | None, typer.Option(help="hf: folder whose config.json is copied")] = None,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC", help="of a run: its best checkpoint by loss, eval_loss, eval_NAME")
    ] = None,
    mode: Annotated[Mode | None, typer.Option(help="with --best: whether more or less of METRIC is better")] = None,
) -> None:
    """Write a checkpoint for other programs, by original parameter names."""
    from raypipe.api.export import export_hugging_face, export_safetensors

    if (best is None) != (mode is None):
        raise typer.BadParameter("--best and --mode belong together, as in --best eval_loss --mode min.")
    source = (
        checkpoint if "://" in checkpoint or Path(checkpoint).exists() else str(known_folder(checkpoint) or checkpoint)
    )
    if best is not None and mode is not None:
        from raypipe.engine.checkpoint import best_checkpoint
        from raypipe.engine.storage import Place

        source = best_checkpoint(Place.of(source), best, mode.value)
        typer.echo(f"the best by {best} is {source}")
    if to is Form.SAFETENSORS:
        if config is not None:
            raise typer.BadParameter("--config belongs to --to hf.")
        shared = export_safetensors(source, output)
    else:
        shared = export_hugging_face(source, output, config)
    typer.echo(f"wrote {output}")
    for name, owner in shared.items():
        typer.echo(f"{name} is {owner}, which is stored once")
