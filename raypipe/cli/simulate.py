"""``raypipe simulate``: a step on paper, of a run's plan or of any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypipe.cli.common import Overrides, check_output, open_runfile, trainer_of, write
from raypipe.ir.schedule_spec import KINDS, ScheduleSpec, takes
from raypipe.ir.timeline import Timeline
from raypipe.viz.chrome_trace import chrome_trace_json
from raypipe.viz.timeline_svg import timeline_svg

if TYPE_CHECKING:
    from raypipe.ir.schedule import Schedule


WIDEST_PICTURE = 200
_KINDS = tuple(name for name, kind in KINDS.items() if kind.synchronous)
_ON_PAPER = (
    "stages", "microbatches", "schedule", "group_size", "slack", "chunks",
    "forward_ms", "backward_ms", "latency_ms", "occupancy_ms", "csv",
)  # fmt: skip


def simulate(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="a run's settings")] = None,
    overrides: Overrides = None,
    stages: Annotated[int, typer.Option(help="how many the model is cut into")] = 4,
    microbatches: Annotated[int, typer.Option(help="per optimizer step")] = 8,
    schedule: Annotated[str, typer.Option(help=", ".join(_KINDS))] = "1f1b",
    group_size: Annotated[int | None, typer.Option(help="micro-batches that kfkb takes as a group")] = None,
    slack: Annotated[int | None, typer.Option(help="forwards that slack and zb-h1 start ahead, per link")] = None,
    chunks: Annotated[int | None, typer.Option(help="stages per worker of interleaved")] = None,
    forward_ms: Annotated[float, typer.Option(help="of one micro-batch on one stage")] = 10.0,
    backward_ms: Annotated[float, typer.Option(help="of one micro-batch on one stage")] = 20.0,
    latency_ms: Annotated[float, typer.Option(help="of a message, between every two stages")] = 0.0,
    occupancy_ms: Annotated[float, typer.Option(help="how long a message keeps a link busy")] = 0.0,
    csv: Annotated[Path | None, typer.Option(help="write the rows in torch's compute-only form")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto")] = None,
    svg: Annotated[Path | None, typer.Option(help="write a picture")] = None,
) -> None:
    """Run a schedule on paper: step time, idle time, memory, picture.

    With CONFIG.yaml the schedule, the stage times and the links are those of that run's plan; without, they are
    given by options and need neither model nor cluster.
    """
    for output in (csv, trace, svg):
        check_output(output)
    if config is not None:
        _refuse_options(context)
        timeline = trainer_of(open_runfile(config, overrides)).simulate()
        typer.echo(
            f"predicted: {timeline.makespan_s * 1e3:.1f} ms per step, workers idle {timeline.bubble_fraction:.1%} "
            "of it, as in its plan"
        )
    else:
        if overrides:
            raise typer.BadParameter("--set changes the settings of a CONFIG.yaml: name one, or leave --set out.")
        on_paper = _made(schedule, stages, microbatches, group_size, slack, chunks)
        timeline = _on_paper(on_paper, forward_ms / 1e3, backward_ms / 1e3, latency_ms / 1e3, occupancy_ms / 1e3)
        whole_ms = stages / on_paper.num_workers * (forward_ms + backward_ms)  # 1f1b has one stage on each of them
        _say(on_paper, timeline, (microbatches + on_paper.num_workers - 1) * whole_ms)
        if csv is not None:
            from raypipe.planner.schedule.text import to_csv

            _write(csv, to_csv(on_paper))
    typer.echo(f"micro-batches held at once, by stage: {' '.join(map(str, timeline.peak_in_flight))}")
    if trace is not None:
        _write(trace, chrome_trace_json([timeline]))
    if svg is not None:
        _write(svg, timeline_svg([timeline]))


def _refuse_options(context: typer.Context) -> None:
    for name in _ON_PAPER:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} is for a schedule on paper; a CONFIG.yaml is changed with --set.")


def _made(
    schedule: str, stages: int, microbatches: int, group_size: int | None, slack: int | None, chunks: int | None
) -> Schedule:
    from raypipe.planner.schedule import schedule_of

    numbers_by_name = {
        "group_size": group_size,
        "slack": None if slack is None else (slack,) * (stages - 1),
        "chunks": chunks,
    }
    for name, value in numbers_by_name.items():
        if value is None and takes(schedule, name):
            raise typer.BadParameter(f"The schedule {schedule!r} needs --{name.replace('_', '-')}.")
    if schedule in KINDS and not KINDS[schedule].synchronous:
        raise typer.BadParameter(f"{schedule!r} does not run empty between steps: take one of {', '.join(_KINDS)}.")
    numbers: dict[str, Any] = {name: value for name, value in numbers_by_name.items() if value is not None}
    return schedule_of(ScheduleSpec(schedule, microbatches, **numbers), stages)


def _on_paper(
    schedule: Schedule, forward_s: float, backward_s: float, latency_s: float, occupancy_s: float
) -> Timeline:
    from raypipe.planner.schedule.lower import lower, validate
    from raypipe.planner.simulator import Costs
    from raypipe.planner.simulator import simulate as run_on_paper

    stages, hops = schedule.num_stages, schedule.num_stages - 1
    costs = Costs(
        forward_s=(forward_s,) * stages,
        backward_s=(backward_s,) * stages,
        forward_latency_s=(latency_s,) * hops,
        backward_latency_s=(latency_s,) * hops,
        forward_occupancy_s=(occupancy_s,) * hops,
        backward_occupancy_s=(occupancy_s,) * hops,
    )
    return run_on_paper(validate(lower(schedule)), costs)


def _say(schedule: Schedule, timeline: Timeline, ideal_ms: float) -> None:
    from raypipe.planner.schedule.text import draw

    # Every action takes at least three characters: most pictures that are too wide are not drawn at all.
    if 3 * max(map(len, schedule.body)) <= WIDEST_PICTURE:
        picture = draw(schedule)
        if max(map(len, picture.splitlines())) <= WIDEST_PICTURE:
            typer.echo(picture)
    typer.echo(
        f"{schedule.kind}: {timeline.makespan_s * 1e3:.1f} ms per step, workers idle {timeline.bubble_fraction:.1%} "
        f"of it; 1f1b takes {ideal_ms:.1f} ms where sending takes no time"
    )


def _write(path: Path, text: str) -> None:
    write(path, text)
    typer.echo(f"wrote {path}")
