"""The command line: one thin function per verb, one file per group of verbs.

Exit status: 0 all is well, 1 an error of raypipe (one paragraph on standard error; RAYPIPE_DEBUG=1 shows where it
comes from), 2 a mistake in the command itself, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. torch, Ray and
numpy are imported by the verbs that need them.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Annotated

import typer

from raypipe.cli.machine_commands import dashboards, doctor, init, probe
from raypipe.cli.plan_commands import data, plan, profile, simulate
from raypipe.cli.run_commands import export, list_runs, report, resize, status, stop, trace, train
from raypipe.errors import RaypipeError

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pipelines of Ray actors that adapt and survive.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from raypipe import __version__  # runs git

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Pipelines of Ray actors that adapt and survive."""


for _verb in (init, train, plan, profile, data, simulate, status, stop, resize, trace, report, export, doctor, probe):
    app.command()(_verb)
app.command("list")(list_runs)
app.add_typer(dashboards, name="dashboards")


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


_INTERRUPTED = 130
"""Exit code after Ctrl-C, as of shells."""


def main() -> None:
    """Run the command line; an error of raypipe is printed as one paragraph, not as a traceback."""
    # After a trace Python would search millions of objects for cycles before it ends, which takes more than a second.
    atexit.register(gc.freeze)
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
        words = " ".join(str(error).split())
        sys.stderr.write(
            f"raypipe: {type(error).__name__}: {words} This error is not raypipe's own; set RAYPIPE_DEBUG=1 for "
            "its traceback, and add it to a bug report.\n"
        )
        sys.exit(1)
