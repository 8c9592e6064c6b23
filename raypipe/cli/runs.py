"""``raypipe list``, ``status``, ``stop``, ``resize``, ``trace`` and ``report RUN``: a run by its name or by its folder.

A folder answers for itself when the run in it is over, so that yesterday's run needs no cluster; by its name it is
looked for in the usual place. Otherwise a name is looked up on the cluster (RAY_ADDRESS, or the one of this machine).
"""

from __future__ import annotations

import json as json_format
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypipe.cli.common import Run, is_run_folder, known_folder, unheard
from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from raypipe.engine.storage import Place

__all__ = ["list_runs", "report", "resize", "status", "stop", "trace"]

Json = Annotated[bool, typer.Option("--json", help="all of it, for programs")]
_COLUMNS = ("NAME", "STATE", "STEP", "LAST WRITE", "FOLDER")


def list_runs(
    folder: Annotated[str | None, typer.Argument(metavar="[FOLDER]", help="a storage_path; ~/ray_results")] = None,
    json: Json = False,
) -> None:
    """List the runs of a folder, the one that was written last at the end."""
    from raypipe.api.listing import DEFAULT_STORAGE, runs_in
    from raypipe.engine.storage import Place

    storage = Place.of(folder or DEFAULT_STORAGE)
    found = runs_in(storage)
    if json:
        typer.echo(json_format.dumps([asdict(run) for run in found]))
        return
    if not found:
        typer.echo(f"no runs in {storage}")
        return
    rows = [_COLUMNS, *((r.name, r.state, f"{r.step}/{r.num_steps}", _date(r.last_write_s), r.folder) for r in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def status(run: Run, json: Json = False) -> None:
    """Say where a run stands."""
    folder = known_folder(run)
    found = _ended(folder) if folder else None
    if found is not None:
        typer.echo(json_format.dumps(found) if json else _line(found))
        return
    try:
        now = _attached(run).status()
    except ConfigError:
        if folder is None:
            raise
        _tell_folder(folder, json)
        return
    typer.echo(json_format.dumps({**asdict(now), "seconds_left": now.seconds_left}) if json else str(now))


def stop(run: Run) -> None:
    """Ask a run to end after the step that is running, with a checkpoint."""
    handle = _attached(run)
    handle.stop(reason="raypipe stop")
    typer.echo(f"{handle.name} stops after the step that is running; raypipe status {handle.name} says when it has")


def resize(
    run: Run,
    num_stages: Annotated[int, typer.Option("--num-stages", help="Stages that the run goes on with.", min=1)],
    num_replicas: Annotated[
        str, typer.Option("--num-replicas", help="Workers per stage: a number for all, or one for each, as in 2-1-1.")
    ] = "",
) -> None:
    """Give a run that trains another number of stages, or of workers of each.

    No bit of the result changes, but of asynchronous schedules.
    """
    parts = num_replicas.split("-") if num_replicas else []
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--num-replicas {num_replicas}: give a number, or one for each stage, as in 2-1-1.")
    counts = [int(part) for part in parts]
    handle = _attached(run)
    handle.resize(num_stages, num_replicas=None if not counts else counts if len(counts) > 1 else counts[0])
    typer.echo(f"{handle.name} goes on with {num_stages} stages{f', {num_replicas} workers' * bool(counts)}")


def trace(
    run: Run,
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write")],
) -> None:
    """Write a run's timeline, predicted above measured, for https://ui.perfetto.dev."""
    from raypipe.engine.storage import Place

    text = _trace_text(Place.of(_folder(run)))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}. Give another -o.") from error
    typer.echo(f"wrote {output}")


def report(
    run: Run,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="file; report.html in the run's folder")] = None,
) -> None:
    """Write what a run did as one HTML file, for any browser; it loads nothing from anywhere."""
    from raypipe.api.listing import summary_of
    from raypipe.engine.storage import Place
    from raypipe.report.page import write_report

    folder = Place.of(_folder(run))
    typer.echo(f"wrote {write_report(folder, summary_of(folder).state, str(output or ''))}")


def _attached(run: str) -> Any:
    from raypipe.api.handle import attach
    from raypipe.api.listing import DEFAULT_STORAGE

    try:
        with unheard():
            return attach(Path(run).absolute().name if is_run_folder(Path(run)) else run)
    except ConfigError as error:
        if known_folder(run) is not None:
            raise
        raise ConfigError(f"There is no run's folder {run}, neither here nor in {DEFAULT_STORAGE}. {error}") from None


def _folder(run: str) -> str:
    """Where a run's files are: a URI, the folder itself, the usual place of that name, or what the cluster says."""
    known = None if "://" in run else known_folder(run)
    return str(known) if known else run if "://" in run else _attached(run).path


def _ended(folder: Path) -> dict[str, Any] | None:
    """The last word of a run that is over, from its folder; None while it goes on."""
    from raypipe.api.listing import last_word
    from raypipe.engine.storage import Place

    return last_word(Place.of(folder))


def _tell_folder(folder: Path, json: bool) -> None:
    """What is known of a run that no cluster here knows: it may be in threads, on another cluster, or killed."""
    from raypipe.api.listing import summary_of
    from raypipe.engine.storage import Place

    found = summary_of(Place.of(folder))
    written = f"last write {_date(found.last_write_s)}"
    text = f"{found.name}: {found.state}, step {found.step}/{found.num_steps}; {written}; {found.folder}"
    typer.echo(json_format.dumps(asdict(found)) if json else text)


def _date(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds is not None else "unknown"


def _line(found: dict[str, Any]) -> str:
    parts = [f"{found['name']}: {found['state']}", str(found.get("reason", ""))]
    parts += [f"{key} {found[key]}" for key in ("step", "num_steps", "eval_loss", "checkpoint") if found.get(key)]
    return "; ".join(filter(None, parts))


def _trace_text(folder: Place) -> bytes:
    """trace.json of a run's folder, or the same made of its spans."""
    if folder.exists("timeline/trace.json"):
        return folder.read_bytes("timeline/trace.json")
    if not folder.exists("timeline/spans.parquet"):
        raise ConfigError(
            f"{folder} has no timeline: a run writes it at its end. Give the folder of one that has ended."
        )
    from raypipe.ir.trace import chrome_trace_json
    from raypipe.report.read import timelines_of

    return chrome_trace_json(timelines_of(folder)).encode()
