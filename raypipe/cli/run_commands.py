"""``raypipe train``, and ``list``, ``status``, ``stop``, ``resize``, ``trace``, ``report`` and ``export`` of a run.

A run is given by its name or its folder. The folder of a run that has ended needs no cluster; a name is looked up in
the usual place, then on the cluster (RAY_ADDRESS, or the one of this machine).
"""

from __future__ import annotations

import json as json_format
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypipe.cli.common import ConfigFile, Overrides, Run, known_folder, open_runfile, trainer_of, unheard
from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from raypipe.engine.io.storage import Place


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
    from raypipe.runfile.run_file import with_name

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


Json = Annotated[bool, typer.Option("--json", help="all of it, for programs")]
_COLUMNS = ("NAME", "STATE", "STEP", "LAST WRITE", "FOLDER")


def list_runs(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="a storage_path; ~/ray_results and below")
    ] = None,
    json: Json = False,
) -> None:
    """List the runs of a folder, sorted by the time of their last write."""
    from raypipe.api.listing import runs_in
    from raypipe.config.paths import DEFAULT_STORAGE
    from raypipe.engine.io.storage import Place

    storage = Place.of(folder or DEFAULT_STORAGE)
    runs = runs_in(storage, deeper=folder is None)
    if json:
        typer.echo(json_format.dumps([asdict(run) for run in runs]))
        return
    if not runs:
        typer.echo(f"no runs in {storage}")
        return
    steps = [f"{run.step}/{run.num_steps}" if run.num_steps else "" for run in runs]
    rows = [
        _COLUMNS,
        *((r.name, r.state, n, _date(r.last_write_s), r.folder) for r, n in zip(runs, steps, strict=True)),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def status(run: Run, json: Json = False) -> None:
    """Show the state of a run."""
    from raypipe.api.listing import last_word
    from raypipe.run.status import alerts_in, as_event

    folder = known_folder(run)
    last = last_word(folder) if folder else None
    if folder is not None and last is not None:
        alerts = alerts_in(folder)
        typer.echo(json_format.dumps({**last, "alerts": as_event(alerts)}) if json else _lines(_line(last), alerts))
        return
    try:
        now = _attached(run).status()
    except ConfigError:
        if folder is None:
            raise
        _print_folder_state(folder, json)
        return
    typer.echo(
        json_format.dumps({**asdict(now), "seconds_left": now.seconds_left}) if json else _lines(str(now), now.alerts)
    )


def stop(run: Run) -> None:
    """Stop a run after the step that is running, with a checkpoint."""
    handle = _attached(run)
    handle.stop(reason="raypipe stop")
    typer.echo(f"{handle.name} stops after the step that is running; see raypipe status {handle.name}")


def resize(
    run: Run,
    num_stages: Annotated[int, typer.Option("--num-stages", help="Stages that the run goes on with.", min=1)],
    num_replicas: Annotated[
        str, typer.Option("--num-replicas", help="Workers per stage: a number for all, or one for each, as in 2-1-1.")
    ] = "",
) -> None:
    """Change the number of stages of a running run, or the number of workers per stage.

    Results stay bitwise equal, except with asynchronous schedules.
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
    output: Annotated[str, typer.Option("-o", "--output", help="file or URI to write")],
) -> None:
    """Write a run's timeline, predicted above measured, for https://ui.perfetto.dev."""
    from raypipe.engine.io.storage import Place, PlaceError

    text = _trace_text(_folder(run))
    try:
        Place.of(output).write_bytes("", text)
    except PlaceError as error:
        raise ConfigError(f"{output} cannot be written: {error.__cause__ or error}. Give another -o.") from error
    typer.echo(f"wrote {output}")


def report(
    run: Run,
    output: Annotated[str, typer.Option("-o", "--output", help="file or URI; report.html in the run's folder")] = "",
) -> None:
    """Write a report of a run as one HTML file, which any browser shows without a network."""
    from raypipe.api.listing import summary_of
    from raypipe.report.page import write_report

    folder = _folder(run)
    typer.echo(f"wrote {write_report(folder, summary_of(folder).state, output)}")


def _attached(run: str) -> Any:
    from raypipe.api.handle import attach
    from raypipe.config.paths import DEFAULT_STORAGE

    folder = known_folder(run)
    try:
        with unheard():
            return attach(folder.name if folder else run)
    except ConfigError as error:
        if folder is not None:
            raise
        raise ConfigError(f"There is no run's folder {run}, neither here nor in {DEFAULT_STORAGE}. {error}") from None


def _folder(run: str) -> Place:
    """Return a run's folder, from its path, its address, its name in ~/ray_results or its name on the Ray cluster."""
    from raypipe.engine.io.storage import Place

    return known_folder(run) or Place.of(_attached(run).path)


def _print_folder_state(folder: Place, json: bool) -> None:
    """Print the state of a run that is not on this cluster, from its folder.

    The run may be in threads of another process, on another cluster, or killed.
    """
    from raypipe.api.listing import summary_of
    from raypipe.run.status import steps_done

    summary = summary_of(folder)
    written = f"last write {_date(summary.last_write_s)}"
    state = ", ".join(filter(None, (summary.state, steps_done(summary.step, summary.num_steps))))
    text = f"{summary.name}: {state}; {written}; {summary.folder}"
    typer.echo(json_format.dumps(asdict(summary)) if json else text)


def _date(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds is not None else "unknown"


def _line(last: dict[str, Any]) -> str:
    parts = [f"{last['name']}: {last['state']}", str(last.get("reason", ""))]
    parts += [f"{key} {last[key]}" for key in ("step", "num_steps", "eval_loss", "checkpoint") if last.get(key)]
    return "; ".join(filter(None, parts))


def _lines(line: str, alerts: Iterable[Any]) -> str:
    """Join a line of text and one line for each alert."""
    return "\n".join([line, *(f"  {alert}" for alert in alerts)])


def _trace_text(folder: Place) -> bytes:
    """Return the trace in a run's folder, built from timeline/spans.parquet if there is no trace.json."""
    if folder.exists("timeline/trace.json"):
        return folder.read_bytes("timeline/trace.json")
    if not folder.exists("timeline/spans.parquet"):
        raise ConfigError(
            f"{folder} has no timeline: a run writes it at its end. Give the folder of one that has ended."
        )
    from raypipe.report.run_facts import timelines_of
    from raypipe.viz.chrome_trace import chrome_trace_json

    return chrome_trace_json(timelines_of(folder)).encode()


class Form(StrEnum):
    """Formats of an export."""

    SAFETENSORS = "safetensors"
    HF = "hf"


class Mode(StrEnum):
    """Direction of a metric: larger (max) or smaller (min) numbers are better."""

    MAX = "max"
    MIN = "min"


def export(
    checkpoint: Annotated[str, typer.Argument(help="folder or URI of a checkpoint, or a run for its newest one")],
    output: Annotated[str, typer.Option("-o", "--output", help="file for safetensors, new folder for hf, or a URI")],
    to: Annotated[Form, typer.Option(help="one file, or a folder for from_pretrained")] = Form.SAFETENSORS,
    config: Annotated[Path | None, typer.Option(help="hf: folder whose config.json is copied")] = None,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC", help="of a run: its best checkpoint by loss, eval_loss, eval_NAME")
    ] = None,
    mode: Annotated[Mode | None, typer.Option(help="with --best: whether more or less of METRIC is better")] = None,
) -> None:
    """Write a checkpoint for other programs, with the original parameter names."""
    from raypipe.api.export import export_hugging_face, export_safetensors
    from raypipe.config.paths import is_address
    from raypipe.engine.io.storage import Place

    if (best is None) != (mode is None):
        raise typer.BadParameter("--best and --mode belong together, as in --best eval_loss --mode min.")
    place = Place.of(checkpoint)
    if not (is_address(checkpoint) or place.exists()):
        place = known_folder(checkpoint) or place
    source = str(place)
    if best is not None and mode is not None:
        from raypipe.engine.io.checkpoint import best_checkpoint

        source = best_checkpoint(place, best, mode.value)
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
