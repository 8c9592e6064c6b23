"""ScheduleSpec: a schedule's kind with its numbers, and the table of all kinds.

    config, request --> ScheduleSpec --> planner.schedule.schedule_of --> rows of actions
    plan.json, segments, memory model, controller: the same ScheduleSpec

As text, ``str`` and ``ScheduleSpec.parse``; ``name`` is the part before the first comma:

    1f1b, M=8          kfkb k=2, M=8          slack r=2,2,1, M=8, first_trainable=1          zb-h1 r=1, M=4, overlap
    1f1b, M=8, replicas=3-1, lanes=3                                      zb-h1 r=2,1 w=0,2,1, M=8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from raypipe.errors import ScheduleError
from raypipe.ir.from_plain import from_plain


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """Properties of one kind of schedule.

    Attributes:
        takes: fields of ScheduleSpec that apply to this kind only.
        synchronous: True if the pipeline is flushed before every update of the weights.
        splits_backward: True if backwards are split into I (gradients of inputs) and W (of weights) instead of B.
        stages_per_worker: number of stages on each worker; None if ``ScheduleSpec.chunks`` gives the number.
        searched: True if the controller searches the numbers of the schedule that the user leaves open.
        memory_formula: True if planner.cost.memory has a formula for the activations in flight; otherwise they are
            counted in the rows of actions.
    """

    takes: tuple[str, ...] = ()
    synchronous: bool = True
    splits_backward: bool = False
    stages_per_worker: int | None = 1
    searched: bool = False
    memory_formula: bool = True

    @property
    def turned(self) -> bool:
        """True if the controller may change the schedule, micro-batches or codecs of a run."""
        return self.synchronous and not self.several_stages

    @property
    def several_stages(self) -> bool:
        """True if a worker holds several stages."""
        return self.stages_per_worker != 1


KINDS: Mapping[str, ScheduleKind] = {
    "gpipe": ScheduleKind(),
    "1f1b": ScheduleKind(),
    "kfkb": ScheduleKind(("group_size",), searched=True),
    "slack": ScheduleKind(("slack",), searched=True),
    "interleaved": ScheduleKind(("chunks",), stages_per_worker=None, memory_formula=False),
    "zb-h1": ScheduleKind(("slack", "lag"), splits_backward=True, searched=True),
    "zb-v": ScheduleKind(splits_backward=True, stages_per_worker=2, memory_formula=False),
    "pipedream": ScheduleKind(("slack", "update_interval"), synchronous=False),
    "2bw": ScheduleKind(("slack",), synchronous=False),
}
"""Kinds of schedules, by the name in PipelineConfig.schedule."""

AUTO_KINDS = ("1f1b", "slack", "zb-h1")
"""Candidates of schedule="auto". kfkb is left out: slack is as fast on every link and holds fewer micro-batches
(docs/design/0015-controller.md)."""

_LETTERS = {"group_size": "k", "slack": "r", "lag": "w", "chunks": "v", "update_interval": "u"}
_UNSET = {"group_size": 1, "slack": (), "lag": (), "chunks": 1, "update_interval": None}


def takes(schedule: str, field: str) -> bool:
    """Return True if a field of ScheduleSpec applies to the named schedule; False for "auto" and files."""
    return schedule in KINDS and field in KINDS[schedule].takes


def kinds_to_search(schedule: str) -> tuple[str, ...]:
    """Return the kinds of schedule that the controller may choose from; () if it may not change this schedule.

    Args:
        schedule: "auto" or a kind, as in PipelineConfig.schedule. The user has set no group size or slack.
    """
    if schedule == "auto":
        return AUTO_KINDS
    return (schedule,) if schedule in KINDS and KINDS[schedule].searched else ()


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """Kind and numbers that determine the order of actions, given the number of stages.

    Attributes:
        kind: key of ``KINDS``.
        num_microbatches: M, per optimizer step.
        group_size: k of kfkb.
        slack: r by hop, for slack, zb-h1 and the asynchronous kinds; empty with a single stage.
        lag: w by stage, for zb-h1: the most micro-batches by which a stage defers weight gradients; empty for as many
            as slack allows. The planner sets it where a stage lacks memory.
        chunks: v, stages per worker of interleaved.
        first_trainable: lowest stage with a backward.
        overlap: True if no stage waits for the global gradient norm before its optimizer step, so that steps overlap
            if the kind allows it; no effect on other kinds.
        update_interval: u of pipedream, micro-batches per update.
        replicas: workers by stage; empty for one each.
        lanes: gradient-accumulation lanes, at least as many as any stage has replicas.
        per_replica: True if a stage of pipedream updates as soon as each of its replicas has done one micro-batch more.

    Raises:
        ScheduleError: an unknown kind, a field that it does not have, or a number out of range.
    """

    kind: str
    num_microbatches: int = 1
    group_size: int = 1
    slack: tuple[int, ...] = ()
    lag: tuple[int, ...] = ()
    chunks: int = 1
    first_trainable: int = 0
    overlap: bool = False
    update_interval: int | None = None
    replicas: tuple[int, ...] = ()
    lanes: int = 1
    per_replica: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = get_close_matches(self.kind, KINDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ScheduleError(f"There is no schedule {self.kind!r}: choose one of {', '.join(KINDS)}.{hint}")
        for field, unset in _UNSET.items():
            value = getattr(self, field)
            if value != unset and not takes(self.kind, field):
                raise ScheduleError(f"The schedule {self.kind!r} has no {field}: leave out {field}={value}.")
        if any(r < 1 for r in self.slack):
            raise ScheduleError(f"slack is {self.slack}: every hop needs at least 1, which is 1F1B.")
        if any(w < 0 for w in self.lag):
            raise ScheduleError(f"lag is {self.lag}: every stage needs at least 0, which defers no weight gradients.")
        if len(set(self.replicas)) > 1 and self.of_kind.several_stages:
            raise ScheduleError(
                f"replicas={self.replicas} with the schedule {self.kind!r}: workers that hold several stages have as "
                f"many replicas of each. Give every stage {max(self.replicas)}, or take a schedule with one stage on "
                "each worker, such as '1f1b'."
            )
        if any(count < 1 for count in self.replicas) or max(self.replicas, default=1) > self.lanes:
            raise ScheduleError(
                f"replicas={self.replicas} with lanes={self.lanes}: every stage needs at least one worker, and there "
                "must be as many lanes as the most of them."
            )
        if self.per_replica and not (takes(self.kind, "update_interval") and self.replicas):
            raise ScheduleError(
                f"per_replica has no effect on the schedule {str(self)!r}: it is of 'pipedream' with replicas."
            )
        least = {"num_microbatches": 1, "group_size": 1, "chunks": 1, "first_trainable": 0, "update_interval": 1}
        least["lanes"] = 1
        for field, low in least.items():
            value = getattr(self, field)
            if value is not None and value < low:
                raise ScheduleError(f"The schedule {self.kind!r} with {field}={value}: it must be at least {low}.")

    @property
    def of_kind(self) -> ScheduleKind:
        """Properties of this kind."""
        return KINDS[self.kind]

    def with_microbatches(self, num_microbatches: int) -> ScheduleSpec:
        """Return this schedule for another number of micro-batches; group_size becomes at most this number."""
        group_size = min(self.group_size, max(1, num_microbatches))
        return replace(self, num_microbatches=num_microbatches, group_size=group_size)

    def as_kind(
        self, kind: str, *, group_size: int = 1, slack: tuple[int, ...] = (), lag: tuple[int, ...] = ()
    ) -> ScheduleSpec:
        """Return a synchronous schedule of another kind for the same micro-batches, replicas and lanes."""
        return ScheduleSpec(
            kind,
            self.num_microbatches,
            group_size,
            slack,
            lag,
            first_trainable=self.first_trainable,
            overlap=self.overlap,
            replicas=self.replicas,
            lanes=self.lanes,
        )

    @property
    def name(self) -> str:
        """Kind with its numbers, without the micro-batches: ``slack r=2,2,1``."""
        parts = [self.kind]
        for field in self.of_kind.takes:
            value = getattr(self, field)
            if value != () and value is not None:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                parts.append(f"{_LETTERS[field]}={shown}")
        return " ".join(parts)

    def __str__(self) -> str:
        parts = [self.name, f"M={self.num_microbatches}"]
        if self.first_trainable:
            parts.append(f"first_trainable={self.first_trainable}")
        parts += ["overlap"] * self.overlap + ["per_replica"] * self.per_replica
        if self.replicas:
            parts.append(f"replicas={'-'.join(map(str, self.replicas))}")
        return ", ".join(parts + [f"lanes={self.lanes}"] * (self.lanes > 1))

    @classmethod
    def parse(cls, text: str) -> ScheduleSpec:
        """Parse a schedule; the inverse of ``str``.

        Raises:
            ScheduleError: the text is no such form.
        """
        (kind, *numbers), *rest = [part.split() for part in text.split(", ")] if text.strip() else [[""]]
        fields = {letter: field for field, letter in _LETTERS.items()} | {"M": "num_microbatches"}
        values: dict[str, Any] = {}
        for part in (*numbers, *(" ".join(words) for words in rest)):
            name, _, value = part.partition("=")
            field = fields.get(name, name)
            try:
                if field in ("overlap", "per_replica") and not value:
                    values[field] = True
                elif field in ("slack", "lag", "replicas"):
                    values[field] = tuple(map(int, value.split("-" if field == "replicas" else ",")))
                elif field in (*_UNSET, "num_microbatches", "first_trainable", "lanes"):
                    values[field] = int(value)
                else:
                    raise ValueError
            except ValueError:
                raise ScheduleError(
                    f"{part!r} in the schedule {text!r} cannot be read: write it as 'slack r=2,2,1, M=8'."
                ) from None
        return cls(kind, **values)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict; lag, replicas, lanes and per_replica are left out if they are not set."""
        fields = asdict(self)
        for name, single in (("lag", ()), ("replicas", ()), ("lanes", 1), ("per_replica", False)):
            if fields[name] == single:
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ScheduleSpec:
        """Read what ``to_dict`` wrote, after JSON turned tuples into lists.

        Raises:
            ScheduleError, ValueError: names the field.
        """
        spec: ScheduleSpec = from_plain(cls, dict(fields))
        return spec
