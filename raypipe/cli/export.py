"""``raypipe export CHECKPOINT --to safetensors -o FILE`` and ``--to hf -o FOLDER``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


class Form(StrEnum):
    """What others read."""

    SAFETENSORS = "safetensors"
    HF = "hf"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="a checkpoint's folder, or a run's for its newest one")],
    output: Annotated[Path, typer.Option("-o", "--output", help="a file for safetensors, a new folder for hf")],
    to: Annotated[Form, typer.Option(help="one file, or a folder for from_pretrained")] = Form.SAFETENSORS,
    config: Annotated[Path | None, typer.Option(help="hf: folder whose config.json is copied")] = None,
) -> None:
    """Write a checkpoint for other programs, by original parameter names."""
    from raypipe.api.export import export_hugging_face, export_safetensors

    if to is Form.SAFETENSORS:
        if config is not None:
            raise typer.BadParameter("--config belongs to --to hf.")
        shared = export_safetensors(checkpoint, output)
    else:
        shared = export_hugging_face(checkpoint, output, config)
    typer.echo(f"wrote {output}")
    for name, owner in shared.items():
        typer.echo(f"{name} is {owner}, which is stored once")
