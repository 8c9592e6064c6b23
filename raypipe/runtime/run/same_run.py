"""settings.json: what a run is, so that the same name is never another run in silence.

    settings.json   fixed      seed, data, model ...        label -> value; another one is another run
                    free       learning rate, clipping ...  label -> value; resume=True takes over the new ones
                    versions   of raypipe and torch
                    changes    [{step, lines, options ...}] what was taken over, and after which step

A label is what a person reads: "lr of group 0". Where a checkpoint is older than a change, the change is applied again
when the run goes back to it, so that a crash soon after resume=True does not bring the old learning rate back.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raypipe.engine.checkpoint import FreshOptions
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError

__all__ = [
    "CUTS", "LANES", "SETTINGS", "Change", "Settings", "differences", "fresh_after", "fresh_options", "goes_on",
    "read_settings", "write_settings",
]  # fmt: skip

SETTINGS = "settings.json"
LANES = "num_lanes"
"""The label of the lanes that gradients are summed in; runs of one lane do not have it."""
CUTS = "first operations of the stages"
"""The label of what belongs to which stage; only runs whose weight versions depend on it have it."""
FORMAT = 1
MOST_LINES = 12
MOST_BYTES = 1 << 26
SKETCH_TOLERANCE = 1e-4
"""Relative, of a row's sums: datasets that compute what they return round differently on other processors."""

_OPTION = re.compile(r"(\w+) of group \d+")
_GROUPING = re.compile(r"parameters of group \d+|number of parameter groups")
_STEPPED = re.compile(r"lr of group \d+ after \d+ steps?")
_GRAPH = "operations of the model"
# Where a label of the first kind differs, those of the second differ too, and say nothing more.
_EXPLAINS = (
    (re.compile("optimizer"), re.compile(r".* of group \d+.*|number of parameter groups")),
    (re.compile("lr_scheduler"), re.compile(r".* of the lr_scheduler")),
    (re.compile(r"lr_scheduler|.* of the lr_scheduler|number of parameter groups|.* of group \d+"), _STEPPED),
    (re.compile(r"seed|train_data, (columns|number of samples)"), re.compile("train_data, sample .*")),
    (re.compile(r"seed|eval_data.*, (columns|number of samples)"), re.compile("eval_data, sample .*")),
    (re.compile("parameter .*|model"), re.compile(_GRAPH)),
    (re.compile("schedule"), re.compile(f"num_stages|slack|{CUTS}")),
    (re.compile("num_stages"), re.compile(f"slack|{CUTS}")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is, as labels and values of JSON.

    Attributes:
        fixed: what cannot change in a run that has begun.
        free: what ``resume=True`` may change.
        versions: of raypipe and torch; not compared, but with others the same model may have another graph.
    """

    fixed: Mapping[str, Any]
    free: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)


class Change(NamedTuple):
    """What was taken over after ``step`` steps, in words, and which options of the optimizer are those given."""

    step: int
    lines: tuple[str, ...]
    fresh: FreshOptions


class _Found(NamedTuple):
    settings: Settings
    changes: tuple[Change, ...]


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """By label a plain line for everything that differs, without what follows from another difference."""
    labels = [label for label in (*was, *(n for n in now if n not in was)) if not _same(was.get(label), now.get(label))]
    shown = [
        label
        for label in labels
        if not any(
            last.fullmatch(label) and any(first.fullmatch(other) for other in labels if other != label)
            for first, last in _EXPLAINS
        )
    ]
    return {label: _line(label, was.get(label), now.get(label)) for label in shown}


def goes_on(
    place: Place, name: str, now: Settings, *, done: int, num_steps: int, resume: bool | None
) -> tuple[Change, ...]:
    """What the run in this folder has taken over and takes over now, if it may go on at all.

    Args:
        done: optimizer steps of its newest checkpoint.
        num_steps: that are wanted.
        resume: the trainer's; None goes on where nothing differs, True takes over what may change.

    Raises:
        ConfigError: it is another run, or has done more steps; one line for each difference.
    """
    if resume is False:
        raise ConfigError(f"{place} was begun by somebody else meanwhile. Start again: resume=False finds a new name.")
    if done > num_steps:
        raise ConfigError(
            f"The run {name!r} in {place} has done {done} steps and num_steps={num_steps} is less. Give more steps, "
            f"resume=False to begin anew in another folder, or another name."
        )
    found = read_settings(place)
    if found is None:
        return ()  # of an older release
    fixed = differences(found.settings.fixed, now.fixed)
    if found.settings.versions != now.versions:  # which may trace the same model into other operations
        fixed.pop(_GRAPH, None)
    free = differences(found.settings.free, now.free)
    begun = f"The run {name!r} in {place} has done {done} steps"
    if fixed:
        raise ConfigError(
            f"{begun} as another run:\n{_listed([*fixed.values(), *free.values()])}\n{_what(fixed)} cannot change in a "
            "run that has begun. Put it back, or give resume=False to begin anew in another folder, or another name."
        )
    if not free:
        return found.changes
    _refuse_to_take_over(free, begun, asked=bool(resume), steps_left=num_steps - done)
    return (*found.changes, Change(done, tuple(free.values()), _fresh(free)))


def _refuse_to_take_over(free: Mapping[str, str], begun: str, *, asked: bool, steps_left: int) -> None:
    """ConfigError where nobody asked for the settings that differ, or no step is left to train with them."""
    if not asked:
        raise ConfigError(
            f"{begun} with other settings:\n{_listed(free.values())}\nGive resume=True to go on with the new ones, "
            "resume=False to begin anew in another folder, or another name."
        )
    if not steps_left:
        raise ConfigError(
            f"{begun}, which are all, so that nothing would be trained with what differs:\n{_listed(free.values())}\n"
            "Give more steps, or resume=False to begin anew in another folder."
        )


def fresh_after(changes: Iterable[Change], step: int) -> FreshOptions:
    """The options that are those given, and not those saved, in a checkpoint of ``step`` steps."""
    found = FreshOptions()
    for change in changes:
        if change.step >= step:
            found = found | change.fresh
    return found


def fresh_options(place: Place, step: int) -> FreshOptions:
    """The same of the run in this folder, as its settings.json says.

    Raises:
        ConfigError: that is damaged.
    """
    found = read_settings(place)
    return FreshOptions() if found is None else fresh_after(found.changes, step)


def read_settings(place: Place) -> _Found | None:
    """What settings.json of a run's folder says; None where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    if not place.exists(SETTINGS):
        return None
    try:
        found = json.loads(place.read_bytes(SETTINGS, MOST_BYTES))
        settings = Settings(dict(found["fixed"]), dict(found["free"]), dict(found["versions"]))
        changes = tuple(
            Change(
                int(one["step"]),
                tuple(map(str, one["lines"])),
                FreshOptions(frozenset(map(str, one["options"])), bool(one["scheduled"]), bool(one["every_option"])),
            )
            for one in found["changes"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place / SETTINGS} is damaged ({type(error).__name__}: {error}), so nobody can tell whether this is the "
            "same run. Put it back, or delete it to go on without this check."
        ) from error
    return _Found(settings, changes)


def write_settings(place: Place, settings: Settings, changes: Iterable[Change], num_steps: int) -> None:
    """Write settings.json.

    Raises:
        CheckpointError: the place is full, forbidden or unreachable.
    """
    told = [
        {
            "step": change.step,
            "lines": list(change.lines),
            "options": sorted(change.fresh.names),
            "scheduled": change.fresh.scheduled,
            "every_option": change.fresh.every,
        }
        for change in changes
    ]
    found = {
        "format": FORMAT,
        "num_steps": num_steps,
        "fixed": dict(settings.fixed),
        "free": dict(settings.free),
        "versions": dict(settings.versions),
        "changes": told,
    }
    place.write_bytes(SETTINGS, json.dumps(found, indent=1).encode())


def _fresh(labels: Iterable[str]) -> FreshOptions:
    options, scheduled, every = set(), False, False
    for label in labels:
        if _GROUPING.fullmatch(label):
            every = True
        elif found := _OPTION.fullmatch(label):
            options.add(found[1])
        scheduled = scheduled or "lr_scheduler" in label or _STEPPED.fullmatch(label) is not None
    return FreshOptions(frozenset(options), scheduled or "lr" in options, every)


_DIGESTS = {"sha256", "sampled_sha256"}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys() == {"sums", "size"}:
        size = max(abs(one["size"]), abs(other["size"]))
        pairs = zip([*one["sums"], one["size"]], [*other["sums"], other["size"]], strict=True)
        return all(math.isclose(a, b, rel_tol=0.0, abs_tol=SKETCH_TOLERANCE * size) for a, b in pairs)
    if isinstance(one, dict) and isinstance(other, dict) and {*one, *other} == _DIGESTS:
        return True  # one of all bytes and one of samples, which tell nothing of each other
    return bool(one == other)


def _line(label: str, was: Any, now: Any) -> str:
    if label == LANES:
        return f"num_lanes (or num_replicas, which decide it where it is left out): was {was or 1}, is {now or 1}"
    label = re.sub(r"^lr of group", "learning rate of group", label)
    if isinstance(was, dict) and isinstance(now, dict):
        return f"{label}: another content"
    return f"{label}: was {_shown(was)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return next((str(v) for v in value.values() if isinstance(v, str)), "something else")
    return value if isinstance(value, str) else str(value)


def _listed(lines: Iterable[str]) -> str:
    found = list(lines)
    more = [f"  and {len(found) - MOST_LINES} more"] if len(found) > MOST_LINES else []
    return "\n".join([*(f"  {line}" for line in found[:MOST_LINES]), *more])


def _what(labels: Iterable[str]) -> str:
    """The first words of the labels, once each: what it is about."""
    kinds = dict.fromkeys(re.split(r", | '|:", label)[0] for label in labels)
    return ", ".join(kinds)
