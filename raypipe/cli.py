"""The command line: one thin function per verb. ``raypipe simulate --stages 4 --schedule kfkb --latency-ms 5``"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe import __version__
from raypipe.errors import RaypipeError
from raypipe.ir.picture import timeline_svg
from raypipe.ir.schedule import Schedule
from raypipe.ir.timeline import Timeline, chrome_trace_json
from raypipe.planner.schedule import make_schedule
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.text import draw, to_csv
from raypipe.planner.schedule.validate import validate
from raypipe.planner.simulate import Costs, simulate

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Pipelines of Ray actors that adapt and survive.")

WIDEST_PICTURE = 160


@app.callback()
def root() -> None:
    """Pipelines of Ray actors that adapt and survive."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command("simulate")
def simulate_schedule(
    stages: Annotated[int, typer.Option(help="S")] = 4,
    microbatches: Annotated[int, typer.Option(help="M, per optimizer step")] = 8,
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, kfkb, slack or interleaved")] = "1f1b",
    group_size: Annotated[int | None, typer.Option(help="k of kfkb")] = None,
    slack: Annotated[int | None, typer.Option(help="r of slack, for every hop")] = None,
    chunks: Annotated[int | None, typer.Option(help="stages per worker of interleaved")] = None,
    forward_ms: Annotated[float, typer.Option(help="of one micro-batch on one stage")] = 10.0,
    backward_ms: Annotated[float, typer.Option(help="likewise")] = 20.0,
    latency_ms: Annotated[float, typer.Option(help="one way, of every hop")] = 0.0,
    occupancy_ms: Annotated[float, typer.Option(help="how long a message keeps a link busy")] = 0.0,
    csv: Annotated[Path | None, typer.Option(help="write the rows in torch's compute-only form")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto")] = None,
    svg: Annotated[Path | None, typer.Option(help="write a picture")] = None,
) -> None:
    """Run a schedule on paper: step time, bubble, memory, picture. Needs no model, no cluster."""
    made = make_schedule(schedule, stages, microbatches, group_size=group_size, slack=slack, chunks=chunks)
    hops = stages - 1
    costs = Costs(
        forward_s=(forward_ms / 1e3,) * stages,
        backward_s=(backward_ms / 1e3,) * stages,
        forward_latency_s=(latency_ms / 1e3,) * hops,
        backward_latency_s=(latency_ms / 1e3,) * hops,
        forward_occupancy_s=(occupancy_ms / 1e3,) * hops,
        backward_occupancy_s=(occupancy_ms / 1e3,) * hops,
    )
    timeline = _simulated(made, costs)
    picture = draw(made)
    if max(map(len, picture.splitlines())) <= WIDEST_PICTURE:
        typer.echo(picture)
    ideal_s = (microbatches + stages - 1) * (forward_ms + backward_ms) / 1e3
    typer.echo(
        f"{made.kind}: {timeline.makespan_s * 1e3:.1f} ms per step, bubble {timeline.bubble_fraction:.1%}; "
        f"1f1b with free links takes {ideal_s * 1e3:.1f} ms"
    )
    typer.echo(f"micro-batches held at once, by stage: {' '.join(map(str, timeline.peak_in_flight))}")
    outputs = (
        (csv, to_csv(made)),
        (trace, chrome_trace_json([timeline])),
        (svg, timeline_svg([timeline])),
    )
    for path, text in outputs:
        if path is not None:
            path.write_text(text)
            typer.echo(f"wrote {path}")


def _simulated(made: Schedule, costs: Costs) -> Timeline:
    lowered = lower(made)
    validate(lowered)
    return simulate(lowered, costs)


def main() -> None:
    """Entry point: an error of ours is one paragraph on standard error, not a traceback."""
    try:
        app()
    except RaypipeError as error:
        sys.stderr.write(f"raypipe: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
