"""``raypipe status RUN``, ``stop RUN`` and ``trace RUN``: a run by its name or by its folder.

A name is looked up on the cluster (RAY_ADDRESS, or the one of this machine). A folder answers for itself when the run
in it is over, so that yesterday's run needs no cluster.
"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypipe.cli.common import Run
from raypipe.errors import ConfigError

if TYPE_CHECKING:
    from raypipe.engine.storage import Place

__all__ = ["status", "stop", "trace"]

_ENDS = {"finish": "finished", "fail": "failed", "stop": "stopped"}


def status(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="all of it, for programs")] = False,
) -> None:
    """Say where a run stands."""
    found = _ended(Path(run)) if _is_run_folder(Path(run)) else None
    if found is not None:
        typer.echo(json_format.dumps(found) if json else _line(found))
        return
    now = _attached(run).status()
    typer.echo(json_format.dumps({**asdict(now), "seconds_left": now.seconds_left}) if json else str(now))


def stop(run: Run) -> None:
    """Ask a run to end after the step that is running, with a checkpoint."""
    handle = _attached(run)
    handle.stop(reason="raypipe stop")
    typer.echo(f"{handle.name} stops after the step that is running; raypipe status {handle.name} says when it has")


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


def _is_run_folder(path: Path) -> bool:
    return (path / "events.jsonl").is_file()


def _attached(run: str) -> Any:
    from raypipe.handle import attach

    return attach(Path(run).absolute().name if _is_run_folder(Path(run)) else run)


def _folder(run: str) -> str:
    """Where a run's files are: the folder itself, a URI, the usual place of that name, or what the cluster says."""
    if _is_run_folder(Path(run)) or "://" in run:
        return run
    from raypipe.trainer import DEFAULT_STORAGE

    usual = Path(DEFAULT_STORAGE).expanduser() / run
    return str(usual) if _is_run_folder(usual) else _attached(run).path


def _ended(folder: Path) -> dict[str, Any] | None:
    """The last word of a run that is over, from its folder; None while it goes on."""
    try:
        lines = (folder / "events.jsonl").read_text().splitlines()
        events = [json_format.loads(line) for line in lines if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/events.jsonl cannot be read: {error}. Give the folder of a run.") from error
    started = max((i for i, event in enumerate(events) if event["decision"] == "start"), default=0)
    last = next((event for event in reversed(events[started:]) if event["decision"] in _ENDS), None)
    if last is None:
        return None
    return {"name": folder.absolute().name, "path": str(folder), "state": _ENDS[last["decision"]], **last}


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    from raypipe.ir.schedule import parse_action
    from raypipe.ir.timeline import Span, Timeline, chrome_trace_json

    spans: dict[str, list[Span]] = {}
    for row in pq.read_table(pa.BufferReader(folder.read_bytes("timeline/spans.parquet"))).to_pylist():
        span = Span(row["worker"], parse_action(row["action"]), row["start_s"], row["end_s"])
        spans.setdefault(row["source"], []).append(span)
    return chrome_trace_json(Timeline(tuple(s), source, name=folder.name) for source, s in spans.items()).encode()
