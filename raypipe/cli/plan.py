"""``raypipe plan`` and ``raypipe profile``: what a run would do and why, on this machine or on one that is described.

raypipe profile CONFIG.yaml -o profile.json            measure once
raypipe plan CONFIG.yaml --cluster cluster.yaml        what fits there, how long a step takes, and why
raypipe plan CONFIG.yaml --explain                     all of it: tables, every reason, what was not chosen

Neither starts an actor or needs a cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli.common import ConfigFile, Overrides, open_runfile, trainer_of

if TYPE_CHECKING:
    from raypipe.ir.plan import Plan
    from raypipe.ir.profile import Profile

__all__ = ["plan", "profile"]


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[Path | None, typer.Option(help="a YAML file of devices and links to plan for")] = None,
    profile: Annotated[Path | None, typer.Option(help="use this saved profile instead of measuring")] = None,
    json: Annotated[bool, typer.Option("--json", help="all of it, for programs")] = False,
    svg: Annotated[Path | None, typer.Option(help="write a picture: timeline and stage bars")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="tables, every reason, what was not chosen")] = False,
) -> None:
    """Say what train would do, in four lines: stages, step time, memory, why. Starts nothing.

    With --cluster the plan is for the devices and links described there; speed 1.0 is the machine that timed the model.
    """
    run = open_runfile(config, overrides)
    described = None
    if cluster is not None:
        from raypipe.runfile.cluster import read_cluster

        described = read_cluster(cluster)
    read = None if profile is None else _read(profile)
    made = trainer_of(run, planning=True).plan(cluster=described, profiled=read, explain=explain)
    if svg is not None:
        _draw(made, svg)
    typer.echo(made.to_json() if json else str(made))
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

    found = trainer_of(open_runfile(config, overrides), planning=True).profile()
    typer.echo(found.to_json() if json else profile_table(found))
    if output is not None:
        output.write_text(found.to_json(), encoding="utf-8")
        if not json:
            typer.echo(f"wrote {output}")


def _read(path: Path) -> Profile:
    from raypipe.errors import ConfigError
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
    path.write_text(plan_svg(made, timeline_of(made)), encoding="utf-8")
