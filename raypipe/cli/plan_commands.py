"""``raypipe plan``, ``profile``, ``data`` and ``simulate``: what a run would do and read, here or on described devices.

None of them starts an actor or needs a cluster.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from raypipe.cli.common import ConfigFile, Overrides, check_output, collecting_rarely, open_runfile, trainer_of, write
from raypipe.errors import ConfigError, PlanError
from raypipe.ir.price import cost_lines, cost_of
from raypipe.ir.schedule_spec import KINDS, ScheduleSpec, takes
from raypipe.viz.chrome_trace import chrome_trace_json
from raypipe.viz.timeline_svg import timeline_svg

if TYPE_CHECKING:
    from raypipe.ir.cluster import Cluster
    from raypipe.ir.plan import Plan
    from raypipe.ir.price import Cost
    from raypipe.ir.profile import Profile
    from raypipe.ir.schedule import Schedule
    from raypipe.ir.timeline import Timeline


@collecting_rarely()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[
        list[Path] | None,
        typer.Option(help="a YAML file of devices and links to plan for; several are compared by cost"),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="use this saved profile instead of measuring")] = None,
    json: Annotated[bool, typer.Option("--json", help="all of it, for programs")] = False,
    svg: Annotated[Path | None, typer.Option(help="write a picture: timeline and stage bars")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="tables, every reason, what was not chosen")] = False,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help='for the whole run, as "12 h" or "90 min"')
    ] = None,
    tokens_per_sample: Annotated[int, typer.Option(min=0, help="for the cost of a million tokens")] = 0,
) -> None:
    """Show in four lines what train would do: stages, step time, memory, why. Starts nothing.

    With --cluster the plan is for the devices and links described there; speed 1.0 is the machine that timed the model.
    If the devices have a price_per_hour, the cost of a step and of a million samples is shown.
    """
    check_output(svg)
    run = open_runfile(config, overrides)
    budget = CostBudget(run.values.get("num_steps") or 0, deadline, tokens_per_sample)
    if not cluster and (deadline is not None or tokens_per_sample):
        raise ConfigError("--deadline and --tokens-per-sample are about cost: give one or more --cluster with prices.")
    read = None if profile is None else _read(profile)
    trainer = trainer_of(run, planning=True)
    if cluster and (len(cluster) > 1 or deadline is not None):
        if svg is not None or explain:
            raise ConfigError("--svg and --explain are about one plan: give one --cluster, and no --deadline.")
        typer.echo(compared(cluster, lambda on: trainer.plan(cluster=on, profiled=read), budget, as_json=json))
        return
    described = _described(cluster[0]) if cluster else None
    planned = trainer.plan(cluster=described, profiled=read, explain=explain)
    if svg is not None:
        _draw(planned, svg)
    cost = None if described is None else cost_of(planned, described, budget.num_steps, tokens_per_sample)
    typer.echo(planned.to_json() if json else "\n".join([str(planned), *([] if cost is None else cost_lines(cost))]))
    if svg is not None and not json:
        typer.echo(f"wrote {svg}")


def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="save it for plan --profile")] = None,
    json: Annotated[bool, typer.Option("--json", help="all of it, for programs")] = False,
) -> None:
    """Measure the model on this machine: seconds and bytes of every operation, and seconds by micro-batch size."""
    from raypipe.planner.search import profile_table

    check_output(output)
    measured = trainer_of(open_runfile(config, overrides), planning=True).profile()
    typer.echo(measured.to_json() if json else profile_table(measured))
    if output is not None:
        write(output, measured.to_json())
        if not json:
            typer.echo(f"wrote {output}")


def _described(path: Path) -> Cluster:
    from raypipe.runfile.cluster_file import read_cluster

    return read_cluster(path)


def _read(path: Path) -> Profile:
    from raypipe.ir.profile import Profile

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Write it with `raypipe profile CONFIG.yaml -o FILE`."
        ) from error
    return Profile.from_json(text)


def _draw(plan: Plan, path: Path) -> None:
    from raypipe.errors import PlanError
    from raypipe.planner.search import timeline_of
    from raypipe.viz.plan_svg import plan_svg

    if plan.prediction is None:
        raise PlanError(
            "Nothing of this plan was profiled, so there are no seconds to draw: use a partitioner other than "
            "'parameters', or leave num_microbatches to the planner."
        )
    write(path, plan_svg(plan, timeline_of(plan)))


class CostBudget(NamedTuple):
    """Size of a run whose cost is computed: steps, deadline and tokens.

    Attributes:
        num_steps: number of steps; 0 if unknown.
        deadline: deadline as text, such as "12 h"; None without a deadline.
        tokens_per_sample: tokens of a sample; 0 counts samples instead of tokens.
    """

    num_steps: int
    deadline: str | None
    tokens_per_sample: int

    @property
    def deadline_s(self) -> float | None:
        """Deadline in seconds; None without a deadline.

        Raises:
            ConfigError: the text is no time, or the number of steps is unknown.
        """
        from raypipe.runfile.cluster_file import parse_quantity

        if self.deadline is None:
            return None
        if not self.num_steps:
            raise ConfigError("--deadline is for a run of so many steps: add num_steps, as in --set num_steps=10000.")
        try:
            return parse_quantity(self.deadline, "deadline")
        except ValueError as error:
            raise ConfigError(f"--deadline: {error}") from None


class _Tried(NamedTuple):
    """Result of planning for one cluster.

    Attributes:
        file: the cluster's file.
        plan, cost: the plan and its cost; None if no plan is possible.
        refused: reason why no plan is possible; "" if one is.
    """

    file: Path
    plan: Plan | None
    cost: Cost | None
    refused: str = ""


def compared(files: Sequence[Path], plan: Callable[[Any], Plan], budget: CostBudget, *, as_json: bool) -> str:
    """Plan for all clusters; return a table and the name of the cheapest cluster, as text or as JSON.

    Args:
        plan: (cluster) -> plan.

    Raises:
        ConfigError: a cluster has no prices.
    """
    from raypipe.ir.price import cheapest

    deadline_s = budget.deadline_s
    tried = [_try(file, plan, budget) for file in files]
    best = cheapest([one.cost for one in tried], deadline_s)
    return _json(tried, best) if as_json else _table(tried, best, budget)


def _try(file: Path, plan: Callable[[Any], Plan], budget: CostBudget) -> _Tried:
    from raypipe.runfile.cluster_file import read_cluster

    cluster = read_cluster(file)
    try:
        planned = plan(cluster)
    except PlanError as error:
        return _Tried(file, None, None, str(error).partition(". ")[0] + ".")
    cost = cost_of(planned, cluster, budget.num_steps, budget.tokens_per_sample)
    if cost is None:
        raise ConfigError(f"{file} names no prices, so it cannot be compared: add price_per_hour.")
    return _Tried(file, planned, cost)


def _table(tried: Sequence[_Tried], best: int | None, budget: CostBudget) -> str:
    unit = "tokens" if budget.tokens_per_sample else "samples"
    rows: list[Sequence[str]] = [("cluster", "stages", "step", "a step", f"million {unit}", "an hour", "run", "takes")]
    rows += [_row(one) for one in tried]
    widths = [max(len(row[0]) for row in rows)]
    widths += [max(len(row[i]) for row in rows if len(row) > 2) for i in range(1, len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    in_time = f" within {budget.deadline}" if budget.deadline else ""
    if best is not None:
        lines.append(f"The cheapest{in_time} is {tried[best].file}.")
    else:
        lines.append(f"None of them ends{in_time}." if any(one.plan for one in tried) else "The run fits none of them.")
    return "\n".join(lines)


def _row(one: _Tried) -> tuple[str, ...]:
    from raypipe.ir.units import human_hours, human_price, human_s

    if one.plan is None or one.cost is None:
        return str(one.file), one.refused
    cost = one.cost
    whole = (human_price(cost.run), human_hours(cost.run_s)) if cost.num_steps else ("-", "-")
    money = (human_price(cost.step), human_price(cost.million), human_price(cost.per_hour))
    return str(one.file), str(one.plan.partition.num_stages), human_s(cost.step_s), *money, *whole


def _json(tried: Sequence[_Tried], best: int | None) -> str:
    names = ("per_hour", "hosts", "step_s", "step", "million", "run_s", "run")
    rows = []
    for position, one in enumerate(tried):
        row: dict[str, Any] = {"cluster": str(one.file), "cheapest": position == best, "refused": one.refused}
        row |= {name: getattr(one.cost, name) for name in names if one.cost is not None}
        rows.append({**row, "plan": None if one.plan is None else json_format.loads(one.plan.to_json())})
    return json_format.dumps(rows, indent=1)


def data(config: ConfigFile, overrides: Overrides = None) -> None:
    """Show the first batch of train_data and of eval_data: columns, shapes, types, ranges, first values.

    The data is opened, shuffled and collated as a run does it. The model is neither built nor run.
    """
    from raypipe.api.from_file import first_batches

    run = open_runfile(config, overrides)
    for text in first_batches(trainer_of(run, planning=True)):
        typer.echo(text)


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
    """Simulate one step of a schedule: step time, idle time, memory, picture.

    With CONFIG.yaml the schedule, the stage times and the links are those of that run's plan. Without it, options give
    them, and neither a model nor a cluster is needed.
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

    costs = Costs.uniform(schedule.num_stages, forward_s, backward_s, latency_s, occupancy_s)
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
