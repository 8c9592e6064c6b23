"""``raypipe doctor``: what this machine and cluster can and cannot do, and the cure of what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.common import open_runfile

__all__ = ["doctor", "port_range"]


def doctor(
    address: Annotated[str, typer.Option(help="of a Ray cluster that this machine is part of, or auto")] = "",
    ports: Annotated[str | None, typer.Option(metavar="LOW-HIGH", help="ports that nodes may use")] = None,
    config: Annotated[Path | None, typer.Option(help="a run's YAML file: checks what it asks for")] = None,
    devices: Annotated[str, typer.Option(hidden=True, help="where device files are")] = "/dev",
) -> None:
    """Say what this machine and cluster can and cannot do. Exit status 1 where there is a problem.

    Without --address the cluster is that of RAY_ADDRESS; without that, only this machine is looked at.
    """
    from raypipe.doctor.ask import collect, wishes_of
    from raypipe.doctor.checks import examine

    run = None if config is None else open_runfile(config, None)
    wishes = wishes_of(run, port_range(ports))
    findings = examine(collect(address or os.environ.get("RAY_ADDRESS", ""), wishes, devices), wishes)
    for finding in findings:
        typer.echo(finding)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def port_range(text: str | None) -> tuple[int, int] | None:
    """(lowest, highest) of LOW-HIGH; BadParameter where it is none."""
    if text is None:
        return None
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] <= 65535:
        raise typer.BadParameter(f"--ports {text} is no range: give LOW-HIGH, as in --ports 20000-20100.")
    return found
