"""The command line: one thin function per verb, one file per group of verbs.

    cli/init.py      init                     a YAML file that trains as it stands
    cli/train.py     train                    from a YAML file
    cli/plan.py      plan, profile            from a YAML file, for here or for a described cluster
    cli/data.py      data                     the first batch of a YAML file
    cli/simulate.py  simulate                 a YAML file, or a schedule on paper
    cli/runs.py      list                     the runs of a folder
                     status, stop, resize, trace, report   of a run, by its name or folder
    cli/export.py    export                   a checkpoint for others
    cli/doctor.py    doctor                   this machine and cluster
    cli/probe.py     probe                    the links between a cluster's nodes
    cli/dashboards.py  dashboards install     boards for Grafana, alerts for Prometheus

Exit status: 0 all is well, 1 an error of raypipe (one paragraph on standard error; RAYPIPE_DEBUG=1 shows where it
comes from), 2 a mistake in the command itself, 130 after Ctrl-C. torch, Ray and numpy are
imported by the verbs that need them.
"""

from __future__ import annotations

import os
import sys

import typer

from raypipe import __version__
from raypipe.cli.dashboards import app as dashboards
from raypipe.cli.data import data
from raypipe.cli.doctor import doctor
from raypipe.cli.export import export
from raypipe.cli.init import init
from raypipe.cli.plan import plan, profile
from raypipe.cli.probe import probe
from raypipe.cli.runs import list_runs, report, resize, status, stop, trace
from raypipe.cli.simulate import simulate
from raypipe.cli.train import train
from raypipe.errors import RaypipeError

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pipelines of Ray actors that adapt and survive.",
)


@app.callback()
def root() -> None:
    """Pipelines of Ray actors that adapt and survive."""


for _verb in (init, train, plan, profile, data, simulate, status, stop, resize, trace, report, export, doctor, probe):
    app.command()(_verb)
app.command("list")(list_runs)
app.add_typer(dashboards, name="dashboards")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


_INTERRUPTED = 130
"""What typer ends with after Ctrl-C, as shells do."""


def main() -> None:
    """Entry point: an error is one paragraph on standard error, not a traceback."""
    try:
        app()
    except RaypipeError as error:
        if os.environ.get("RAYPIPE_DEBUG") == "1":
            raise
        sys.stderr.write(f"raypipe: {error}\n")
        sys.exit(1)
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            sys.stderr.write("raypipe: interrupted\n")
        raise
    except Exception as error:
        if os.environ.get("RAYPIPE_DEBUG") == "1":
            raise
        said = " ".join(str(error).split())
        sys.stderr.write(
            f"raypipe: {type(error).__name__}: {said} Nobody has foreseen this; RAYPIPE_DEBUG=1 shows where it comes "
            "from, which is what a report needs.\n"
        )
        sys.exit(1)
