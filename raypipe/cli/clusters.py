"""``raypipe plan --cluster A.yaml --cluster B.yaml``: the same run on several described clusters, and which to rent.

cluster     stages  step    a step   million samples  an hour  run   takes
small.yaml  2       246 ms  0.00041  12.81            6.00     0.41  5 min
large.yaml  8       71 ms   0.00047  14.79            24.00    0.47  1 min
The cheapest within 1 h is small.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypipe.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from raypipe.ir.cost import Cost
    from raypipe.ir.plan import Plan

__all__ = ["Asked", "compared"]


class Asked(NamedTuple):
    """What the run is to cost and take.

    Attributes:
        num_steps: of the whole run; 0 where the run file does not say.
        deadline: for it, in words; None for any time.
        tokens_per_sample: 0 counts samples.
    """

    num_steps: int
    deadline: str | None
    tokens_per_sample: int

    @property
    def deadline_s(self) -> float | None:
        """Seconds of "12 h" and the like.

        Raises:
            ConfigError: it is no time, or the run has no end that could be in time.
        """
        from raypipe.runfile.cluster import parse_quantity

        if self.deadline is None:
            return None
        if not self.num_steps:
            raise ConfigError("--deadline is for a run of so many steps: add num_steps, as in --set num_steps=10000.")
        try:
            return parse_quantity(self.deadline, "deadline")
        except ValueError as error:
            raise ConfigError(f"--deadline: {error}") from None


class _Tried(NamedTuple):
    """A cluster, and the plan for it with its cost, or why there is none."""

    file: Path
    plan: Plan | None
    cost: Cost | None
    refused: str = ""


def compared(files: Sequence[Path], plan: Callable[[Any], Plan], asked: Asked, *, as_json: bool) -> str:
    """A table of all clusters and the sentence that names the cheapest, or the same for programs.

    Args:
        plan: makes one for a Cluster.

    Raises:
        ConfigError: a cluster has no prices.
    """
    from raypipe.ir.cost import cheapest

    deadline_s = asked.deadline_s
    found = [_try(file, plan, asked) for file in files]
    best = cheapest([one.cost for one in found], deadline_s)
    return _json(found, best) if as_json else _table(found, best, asked)


def _try(file: Path, plan: Callable[[Any], Plan], asked: Asked) -> _Tried:
    from raypipe.ir.cost import cost_of
    from raypipe.runfile.cluster import read_cluster

    cluster = read_cluster(file)
    try:
        made = plan(cluster)
    except PlanError as error:
        return _Tried(file, None, None, str(error).partition(". ")[0] + ".")
    cost = cost_of(made, cluster, asked.num_steps, asked.tokens_per_sample)
    if cost is None:
        raise ConfigError(f"{file} names no prices, so it cannot be compared: add price_per_hour.")
    return _Tried(file, made, cost)


def _table(found: Sequence[_Tried], best: int | None, asked: Asked) -> str:
    unit = "tokens" if asked.tokens_per_sample else "samples"
    rows: list[Sequence[str]] = [("cluster", "stages", "step", "a step", f"million {unit}", "an hour", "run", "takes")]
    rows += [_row(one) for one in found]
    widths = [max(len(row[0]) for row in rows)]
    widths += [max(len(row[i]) for row in rows if len(row) > 2) for i in range(1, len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    in_time = f" within {asked.deadline}" if asked.deadline else ""
    if best is not None:
        lines.append(f"The cheapest{in_time} is {found[best].file}.")
    else:
        lines.append(f"None of them ends{in_time}." if any(one.plan for one in found) else "The run fits none of them.")
    return "\n".join(lines)


def _row(one: _Tried) -> tuple[str, ...]:
    from raypipe.ir.cost import human_hours, human_price
    from raypipe.ir.plan_table import human_s

    if one.plan is None or one.cost is None:
        return str(one.file), one.refused
    cost = one.cost
    whole = (human_price(cost.run), human_hours(cost.run_s)) if cost.num_steps else ("-", "-")
    money = (human_price(cost.step), human_price(cost.million), human_price(cost.per_hour))
    return str(one.file), str(one.plan.partition.num_stages), human_s(cost.step_s), *money, *whole


def _json(found: Sequence[_Tried], best: int | None) -> str:
    names = ("per_hour", "hosts", "step_s", "step", "million", "run_s", "run")
    rows = []
    for position, one in enumerate(found):
        row: dict[str, Any] = {"cluster": str(one.file), "cheapest": position == best, "refused": one.refused}
        row |= {name: getattr(one.cost, name) for name in names if one.cost is not None}
        rows.append({**row, "plan": None if one.plan is None else json.loads(one.plan.to_json())})
    return json.dumps(rows, indent=1)
