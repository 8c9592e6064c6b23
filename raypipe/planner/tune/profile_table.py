"""A profile as text: the modules that take most, the totals, and how seconds grow with the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.graph import Node
from raypipe.ir.plan_table import human_bytes, human_s
from raypipe.ir.profile import Profile
from raypipe.planner.tune.predict import source_of
from raypipe.planner.tune.rescale import times_of

__all__ = ["profile_table"]

LONGEST = 40


def profile_table(found: Profile) -> str:
    """Neighbouring operations of one module as one row each; of many rows, those that take longest.

    Seconds are those of one micro-batch, bytes of activations and outputs those of one sample.
    """
    rows = _by_module(found.graph.nodes)
    shown = sorted(sorted(range(len(rows)), key=lambda i: -sum(n.busy_s for n in rows[i][1]))[:LONGEST])
    total_s = found.graph.busy_s or 1.0
    lines = [f"{'forward':>9}  {'backward':>9}  {'share':>5}  {'parameters':>10}  {'kept':>10}  {'output':>10}  module"]
    for name, nodes in (rows[i] for i in shown):
        lines.append(_row(nodes, total_s, f"{name or '(model)'}{f' ({len(nodes)} operations)' * (len(nodes) > 1)}"))
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} more that take less; --json has all")
    lines.append(_row(found.graph.nodes, total_s, f"whole model, {len(found.graph.nodes)} operations"))
    lines.append(f"micro-batch of {found.microbatch_size}; seconds {source_of(found.graph)}")
    if found.device:
        lines.append(f"on {found.device}")
    if len(found.seconds_by_size) > 1:
        lines.append(
            "seconds by micro-batch size: " + ", ".join(f"{b}: {human_s(s)}" for b, s in found.seconds_by_size)
        )
    if (times := times_of(found)) is not None:
        lines.append(
            f"b samples take about {human_s(times.sigma_s)} x (b + {times.overhead_samples:.3g}), "
            f"at most {times.worst_error:.0%} beside what was measured"
        )
    return "\n".join(lines + [f"note: {note}" for note in found.notes])


def _by_module(nodes: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    rows: list[tuple[str, list[Node]]] = []
    for node in nodes:
        if not rows or rows[-1][0] != node.module:
            rows.append((node.module, []))
        rows[-1][1].append(node)
    return rows


def _row(nodes: Sequence[Node], total_s: float, name: str) -> str:
    busy_s = sum(node.busy_s for node in nodes)
    return (
        f"{human_s(sum(n.forward_s for n in nodes)):>9}  {human_s(sum(n.backward_s for n in nodes)):>9}  "
        f"{busy_s / total_s:>5.0%}  {human_bytes(sum(n.param_bytes for n in nodes)):>10}  "
        f"{human_bytes(sum(n.activation_bytes for n in nodes)):>10}  {human_bytes(nodes[-1].output_bytes):>10}  {name}"
    )
