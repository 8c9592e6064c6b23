"""``raypipe plan`` and ``raypipe profile``: what a run would do and why, on this machine or on one that is described.

raypipe profile CONFIG.yaml -o profile.json            measure once
raypipe plan CONFIG.yaml --cluster cluster.yaml        what fits there, how long a step takes, and why
raypipe plan CONFIG.yaml --cluster a.yaml --cluster b.yaml --deadline "12 h"      which of them is the cheapest in time
raypipe plan CONFIG.yaml --explain                     all of it: tables, every reason, what was not chosen

Neither starts an actor or needs a cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli.clusters import Asked, compared
from raypipe.cli.common import ConfigFile, Overrides, check_output, open_runfile, trainer_of, write
from raypipe.errors import ConfigError
from raypipe.ir.cost import cost_lines, cost_of

if TYPE_CHECKING:
    from raypipe.ir.cluster import Cluster
    from raypipe.ir.plan import Plan
    from raypipe.ir.profile import Profile

__all__ = ["plan", "profile"]


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
    """Say what train would do, in four lines: stages, step time, memory, why. Starts nothing.

    With --cluster the plan is for the devices and links described there; speed 1.0 is the machine that timed the model.
    Where they have a price_per_hour, it says what a step and a million samples cost.
    """
    check_output(svg)
    run = open_runfile(config, overrides)
    asked = Asked(run.values.get("num_steps") or 0, deadline, tokens_per_sample)
    if not cluster and (deadline is not None or tokens_per_sample):
        raise ConfigError("--deadline and --tokens-per-sample are about cost: give one or more --cluster with prices.")
    read = None if profile is None else _read(profile)
    trainer = trainer_of(run, planning=True)
    if cluster and (len(cluster) > 1 or deadline is not None):
        if svg is not None or explain:
            raise ConfigError("--svg and --explain are about one plan: give one --cluster, and no --deadline.")
        typer.echo(compared(cluster, lambda on: trainer.plan(cluster=on, profiled=read), asked, as_json=json))
        return
    described = _described(cluster[0]) if cluster else None
    made = trainer.plan(cluster=described, profiled=read, explain=explain)
    if svg is not None:
        _draw(made, svg)
    cost = None if described is None else cost_of(made, described, asked.num_steps, tokens_per_sample)
    typer.echo(made.to_json() if json else "\n".join([str(made), *([] if cost is None else cost_lines(cost))]))
    if svg is not None and not json:
        typer.echo(f"wrote {svg}")


def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="save it for plan --profile")] = None,
    json: Annotated[bool, typer.Option("--json", help="all of it, for programs")] = False,
) -> None:
    """Measure the model on this machine: seconds and bytes of every operation, and seconds by micro-batch size."""
    from raypipe.planner.tune import profile_table

    check_output(output)
    found = trainer_of(open_runfile(config, overrides), planning=True).profile()
    typer.echo(found.to_json() if json else profile_table(found))
    if output is not None:
        write(output, found.to_json())
        if not json:
            typer.echo(f"wrote {output}")


def _described(path: Path) -> Cluster:
    from raypipe.runfile.cluster import read_cluster

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


def _draw(made: Plan, path: Path) -> None:
    from raypipe.errors import PlanError
    from raypipe.ir.pictures.plan import plan_svg
    from raypipe.planner.tune import timeline_of

    if made.prediction is None:
        raise PlanError(
            "Nothing of this plan was profiled, so there are no seconds to draw: use a partitioner other than "
            "'parameters', or leave num_microbatches to the planner."
        )
    write(path, plan_svg(made, timeline_of(made)))
