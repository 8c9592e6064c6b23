"""Comparison of a run's identity, kept in settings.json, with the current settings when the run is resumed.

    settings.json   fixed      seed, data, model ...        label -> value; a different value is another run
                    free       learning rate, clipping ...  label -> value; resume=True accepts new values
                    given      code of the model ...        label -> value; see ``compare``
                    versions   of raypipe and torch
                    changes    [{step, lines, options ...}] accepted new values, and the step of the change

A label is readable text: "lr of group 0". If a run rolls back to a checkpoint that is older than a change, the change
is applied again. So a crash soon after resume=True does not bring the old learning rate back.

Some values are derived by raypipe and torch from user input: the operations of the model, and what its loss averages
over. Other versions of them may derive other values; then the user input itself is compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from raypipe import __version__
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.io.checkpoint import (
    MANIFEST,
    Checkpoint,
    FreshOptions,
    check_position,
    find_checkpoint,
    newest_step,
)
from raypipe.engine.io.run_files import RunFolder
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, ConfigError
from raypipe.run.spec import Outcome, RunIdentity, RunSpec

SETTINGS = "settings.json"
LANES = "num_lanes"
"""Label of the number of lanes, which are partial sums of gradients; absent from runs with one lane."""
CUTS = "first operations of the stages"
"""Label of the first operation of each stage; present only if the weight versions of the schedule depend on it."""
GRAPH = "operations of the model"
"""Label of a traced model's operations; absent for a model that runs as its children."""
REDUCTION = "loss_reduction"
"""Label of what the loss averages over; in ``RunIdentity.given``, of the configured field, which may be "auto"."""
FORMAT = 2
"""Version of the format of settings.json; version 1 lacks ``RunIdentity.given``."""
MOST_LINES = 12
MOST_BYTES = 1 << 26
SKETCH_TOLERANCE = 1e-4
"""Relative tolerance for the sums of a data row, because computed rows are rounded differently on other processors."""

_OPTION = re.compile(r"(\w+) of group \d+")
_GROUPING = re.compile(r"parameters of group \d+|number of parameter groups")
_STEPPED = re.compile(r"lr of group \d+ after \d+ steps?")
_OPERATIONS = re.compile(rf"{GRAPH}|tensor \d+ in the code of the model")
_SHAPED = re.compile(r"(parameter|buffer) '.*|model")
_COMES_AND_GOES = re.compile(r".* of .*|constant '.*'|\w+_data.*, sample .*|loss_fn, .*")
"""Labels that another version of raypipe or torch may add or omit without a change by the user."""
_PLANNED = {LANES, "num_stages", "num_replicas", "replicated_buffers"}  # values of the plan, not of the field
_DEFAULTS = {one.name: one.default for one in fields(PipelineConfig) if one.name not in _PLANNED}
"""Values assumed for absent labels: fields that an older raypipe did not have, or that are written only if set."""
# If a label of the first kind differs, labels of the second kind differ as a consequence and are left out.
_EXPLAINS = (
    (re.compile("optimizer"), re.compile(r".* of group \d+.*|number of parameter groups")),
    (re.compile("lr_scheduler"), re.compile(r".* of the lr_scheduler")),
    (re.compile(r"lr_scheduler|.* of the lr_scheduler|number of parameter groups|.* of group \d+"), _STEPPED),
    (re.compile(r"seed|train_data, (columns|number of samples)"), re.compile("train_data, sample .*")),
    (re.compile(r"seed|eval_data.*, (columns|number of samples)"), re.compile("eval_data, sample .*")),
    (_SHAPED, _OPERATIONS),
    (re.compile("schedule"), re.compile(f"num_stages|slack|{CUTS}")),
    (re.compile("num_stages"), re.compile(f"slack|{CUTS}")),
)  # fmt: skip


class SettingsChange(NamedTuple):
    """Changes accepted by the user after ``step`` steps: a line of text for each, and options that take new values."""

    step: int
    lines: tuple[str, ...]
    fresh: FreshOptions


class Compared(NamedTuple):
    """Differences between two RunIdentity, as {label: line of text}.

    Attributes:
        fixed: differences that make the run another run.
        free: differences that resume=True accepts.
        note: sentence on values that could not be compared; "" if all were.
    """

    fixed: dict[str, str]
    free: dict[str, str]
    note: str = ""


class GoingOn(NamedTuple):
    """Result of ``goes_on`` for a run that may be resumed.

    Attributes:
        changes: changes of settings that the user has accepted so far, including new ones.
        versions: sentence on changed versions; "" if they are equal.
    """

    changes: tuple[SettingsChange, ...] = ()
    versions: str = ""


class SavedSettings(NamedTuple):
    """Content of settings.json: the run's identity, and the changes that the user has accepted since."""

    settings: RunIdentity
    changes: tuple[SettingsChange, ...]


def compare(was: RunIdentity, now: RunIdentity) -> Compared:
    """List the differences between the saved identity ``was`` and the submitted identity ``now``.

    Differences that other versions of raypipe or torch may cause are left out. Models with equal operations are equal,
    whatever their code. If operations differ and versions are equal, the models differ. If versions differ, or the
    model has no graph, the code is compared instead; ``resume=True`` accepts differences of the code.
    """
    equal = was.versions == now.versions
    pairs = (was.fixed, now.fixed), (was.free, now.free), (was.given, now.given if was.given else {})
    fixed, free, given = (differences(*pair, equal_versions=equal) for pair in pairs)
    if not equal:
        free.pop(CUTS, None)
    if REDUCTION not in given and was.given and not equal:
        free.pop(REDUCTION, None)
    given.pop(REDUCTION, None)
    if any(map(_SHAPED.fullmatch, fixed)):
        return Compared(fixed, free)
    unknown = "" if was.given else "the code of the model was not written down then, so it was not compared"
    if not any(map(_OPERATIONS.fullmatch, fixed)):
        return Compared(fixed, free if GRAPH in now.fixed else {**free, **given}, unknown)
    if equal or GRAPH not in fixed:
        if given:
            fixed.pop(GRAPH, None)
        return Compared({**fixed, **given}, free)
    fixed = {label: line for label, line in fixed.items() if not _OPERATIONS.fullmatch(label)}
    if given:
        return Compared(fixed, {**free, **given})
    return Compared(fixed, free, unknown or "the operations of the model have another form; its code is the same")


def differences(was: Mapping[str, Any], now: Mapping[str, Any], *, equal_versions: bool = True) -> dict[str, str]:
    """Describe the differences as {label: line of text}, without those that follow from another difference.

    Args:
        was, now: saved and submitted values by label.
        equal_versions: False if the version of raypipe or torch differs. A label that only one side has is then left
            out if another version may have added or dropped it.
    """
    pairs = {
        label: (was.get(label, _DEFAULTS.get(label)), now.get(label, _DEFAULTS.get(label)))
        for label in dict.fromkeys((*was, *now))
        if equal_versions or (label in was and label in now) or not _may_lack(label, was, now)
    }
    labels = [label for label, pair in pairs.items() if not _same(*pair)]
    shown = [
        label
        for label in labels
        if not any(
            last.fullmatch(label) and any(first.fullmatch(other) for other in labels if other != label)
            for first, last in _EXPLAINS
        )
    ]
    return {label: _line(label, *pairs[label]) for label in shown}


def goes_on(place: Place, name: str, now: RunIdentity, *, done: int, num_steps: int, resume: bool | None) -> GoingOn:
    """Check that the run in this folder may be resumed, and return its earlier changes together with the new ones.

    Args:
        place, name: folder and name of the run.
        now: identity of the submitted run.
        done: optimizer steps of the run's newest checkpoint.
        num_steps: steps that the submission requests.
        resume: as in the trainer; None resumes if nothing differs, True accepts new values of free settings.

    Raises:
        ConfigError: the folder has another run, new values were not accepted, or more than ``num_steps`` steps are
            done. The message has a line for each difference.
    """
    if resume is False:
        raise ConfigError(
            f"{place} was begun by another process meanwhile. Start again: resume=False chooses a new name."
        )
    if done > num_steps:
        raise ConfigError(
            f"The run {name!r} in {place} has done {done} steps and num_steps={num_steps} is less. Give more steps, "
            f"resume=False to begin anew in another folder, or another name."
        )
    saved = read_settings(place)
    if saved is None:
        return GoingOn()  # begun by an older release
    fixed, free, note = compare(saved.settings, now)
    begun = f"The run {name!r} in {place} has done {done} steps"
    if fixed:
        cure = (
            "Put it back, or give resume=False to begin anew in another folder, or another name; "
            f"init_from={name!r} begins with the weights of this run."
        )
        if any(_thaws(label, saved.settings.fixed, now.fixed) for label in fixed):
            cure = (
                "To go on with other parameters frozen, begin another run with these weights: PipelineTrainer(..., "
                f'init_from="{place}", run_config=RunConfig(name="{name}-2")).'
            )
        raise ConfigError(
            f"{begun} as another run:\n{_listed([*fixed.values(), *free.values()])}\n{_what(fixed)} cannot change in a "
            f"run that has begun. {cure}"
        )
    versions = _versions(saved.settings.versions, now.versions, done, note)
    if not free:
        return GoingOn(saved.changes, versions)
    _refuse_to_take_over(free, begun, accepted=bool(resume), steps_left=num_steps - done)
    return GoingOn((*saved.changes, SettingsChange(done, tuple(free.values()), _fresh(free))), versions)


def _versions(was: Mapping[str, str], now: Mapping[str, str], done: int, note: str) -> str:
    """Describe changed versions, and the step ``done`` up to which the old ones trained, followed by ``note``.

    Returns "" if all are equal.
    """
    if was == now:
        return ""
    new, old = (" and ".join(f"{n} {one[n]}" for n in one if was.get(n) != now.get(n)) for one in (now, was))
    return "; ".join([f"continued by {new}, until step {done} by {old}", *([note] if note else [])])


def _thaws(label: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if the parameter named by ``label`` differs between ``was`` and ``now`` only in being frozen."""
    one, other = (str(settings.get(label, "")).removesuffix(", frozen") for settings in (was, now))
    return label.startswith("parameter ") and one == other


def _refuse_to_take_over(free: Mapping[str, str], begun: str, *, accepted: bool, steps_left: int) -> None:
    """Raise ConfigError if the user did not accept the new values with resume=True, or no step is left to use them.

    Args:
        free: line of text on each new value, by label.
        begun: first words of the message.
        steps_left: steps that remain to be trained.
    """
    if not accepted:
        raise ConfigError(
            f"{begun} with other settings:\n{_listed(free.values())}\nGive resume=True to go on with the new ones, "
            "resume=False to begin anew in another folder, or another name."
        )
    if not steps_left:
        raise ConfigError(
            f"{begun}, which are all, so that nothing would be trained with what differs:\n{_listed(free.values())}\n"
            "Give more steps, or resume=False to begin anew in another folder."
        )


def fresh_after(changes: Iterable[SettingsChange], step: int) -> FreshOptions:
    """Return the options that were changed after ``step`` steps or later.

    Their new values replace the values in a checkpoint of that step.
    """
    fresh = FreshOptions()
    for change in changes:
        if change.step >= step:
            fresh = fresh | change.fresh
    return fresh


def fresh_options(place: Place, step: int) -> FreshOptions:
    """Return the options that the user changed after ``step`` steps or later, as listed in this folder's settings.json.

    Raises:
        ConfigError: settings.json is damaged.
    """
    saved = read_settings(place)
    return FreshOptions() if saved is None else fresh_after(saved.changes, step)


def read_settings(place: Place) -> SavedSettings | None:
    """Read settings.json of a run's folder; None if there is no such file.

    Raises:
        ConfigError: the file is damaged.
    """
    if not place.exists(SETTINGS):
        return None
    try:
        saved = json.loads(place.read_bytes(SETTINGS, MOST_BYTES))
        number, versions = int(saved.get("format", 1)), dict(saved["versions"])
        if number > FORMAT:
            raise ConfigError(
                f"{place / SETTINGS} has format {number} of raypipe {versions.get('raypipe')}; this is raypipe "
                f"{__version__}, which reads up to format {FORMAT}. Use that raypipe or a later one, or another name."
            )
        given = dict(saved["given"]) if number > 1 else {}
        settings = RunIdentity(dict(saved["fixed"]), dict(saved["free"]), versions, given)
        changes = tuple(
            SettingsChange(
                int(one["step"]),
                tuple(map(str, one["lines"])),
                FreshOptions(frozenset(map(str, one["options"])), bool(one["scheduled"]), bool(one["every_option"])),
            )
            for one in saved["changes"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{place / SETTINGS}, which identifies the run, is damaged ({type(error).__name__}: {error}). Put it back, "
            "or delete it to go on without this check."
        ) from error
    return SavedSettings(settings, changes)


def write_settings(place: Place, settings: RunIdentity, changes: Iterable[SettingsChange], num_steps: int) -> None:
    """Write settings.json: the run's identity, the accepted changes, and the number of steps that is requested.

    Raises:
        CheckpointError: the storage is full, forbidden or unreachable.
    """
    rows = [
        {
            "step": change.step,
            "lines": list(change.lines),
            "options": sorted(change.fresh.names),
            "scheduled": change.fresh.scheduled,
            "every_option": change.fresh.every,
        }
        for change in changes
    ]
    content = {
        "format": FORMAT,
        "num_steps": num_steps,
        "fixed": dict(settings.fixed),
        "free": dict(settings.free),
        "given": dict(settings.given),
        "versions": dict(settings.versions),
        "changes": rows,
    }
    place.write_bytes(SETTINGS, json.dumps(content, indent=1).encode())


def _fresh(labels: Iterable[str]) -> FreshOptions:
    options, scheduled, every = set(), False, False
    for label in labels:
        if _GROUPING.fullmatch(label):
            every = True
        elif match := _OPTION.fullmatch(label):
            options.add(match[1])
        scheduled = scheduled or "lr_scheduler" in label or _STEPPED.fullmatch(label) is not None
    return FreshOptions(frozenset(options), scheduled or "lr" in options, every)


_DIGESTS = {"sha256", "sampled_sha256"}


def _may_lack(label: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if another version of raypipe or torch may have added or dropped the label."""
    return _COMES_AND_GOES.fullmatch(label) is not None or "file" in (_dict(was.get(label)) | _dict(now.get(label)))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys() == {"sums", "size"}:
        size = max(abs(one["size"]), abs(other["size"]))
        pairs = zip([*one["sums"], one["size"]], [*other["sums"], other["size"]], strict=True)
        return all(math.isclose(a, b, rel_tol=0.0, abs_tol=SKETCH_TOLERANCE * size) for a, b in pairs)
    if isinstance(one, dict) and isinstance(other, dict) and {*one, *other} == _DIGESTS:
        return True  # a digest of all bytes and one of samples: not comparable
    if "file" in _dict(one) and "file" in _dict(other):
        return bool(one["sha256"] == other["sha256"])  # code may move to another file
    return bool(one == other)


def _line(label: str, was: Any, now: Any) -> str:
    if label == LANES:
        return f"num_lanes (or num_replicas, which decide it where it is left out): was {was or 1}, is {now or 1}"
    if "file" in (code := _dict(now) or _dict(was)):
        return f"{label} in {code['file']}: {'changed' if was and now else 'new' if now else 'no longer used'}"
    label = re.sub(r"^lr of group", "learning rate of group", label)
    if isinstance(was, dict) and isinstance(now, dict):
        return f"{label}: another content"
    return f"{label}: was {_shown(was)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return next((str(v) for v in value.values() if isinstance(v, str)), "something else")
    return value if isinstance(value, str) else str(value)


def _listed(lines: Iterable[str]) -> str:
    shown = list(lines)
    more = [f"  and {len(shown) - MOST_LINES} more"] if len(shown) > MOST_LINES else []
    return "\n".join([*(f"  {line}" for line in shown[:MOST_LINES]), *more])


def _what(labels: Iterable[str]) -> str:
    """Join the distinct first words of the labels, for a message."""
    kinds = dict.fromkeys(re.split(r", | '|:", label)[0] for label in labels)
    return ", ".join(kinds)


class Beginning(NamedTuple):
    """Start of a submission (one call of fit or start).

    Attributes:
        checkpoint: checkpoint to restore; None for a new run.
        fresh: optimizer options whose configured values replace those of the checkpoint.
        changes: changes of settings that the user has accepted, for settings.json.
    """

    checkpoint: Checkpoint | None
    fresh: FreshOptions = FreshOptions()  # noqa: RUF100  (immutable)
    changes: tuple[SettingsChange, ...] = ()

    def keep(self, spec: RunSpec) -> None:
        """Write settings.json; called once the stages have restored the checkpoint."""
        write_settings(spec.place, spec.settings, self.changes, spec.num_steps)


def stopped_at(spec: RunSpec, reason: str) -> Outcome:
    """Return the outcome of a run that was stopped before it had workers: step and path of its newest checkpoint."""
    newest = find_checkpoint(spec.place)[0]
    if newest is None:
        return Outcome((), "", 0, reason)
    return Outcome((), str(spec.place / newest.folder), newest.manifest.step, reason)


def beginning(spec: RunSpec, folder: RunFolder) -> Beginning:
    """Find the newest intact checkpoint of this run, after checking that the folder has the same run.

    Args:
        folder: receives events about refused checkpoints and changed settings.

    Raises:
        ConfigError: the folder has another run; the message has a line for each difference.
        CheckpointError: no checkpoint is intact, and at least one of them is damaged.
    """
    checkpoint, refused = find_checkpoint(spec.place)
    for name, reason in refused:
        if spec.place.exists(f"{name}/{MANIFEST}"):
            folder.event("refuse checkpoint", reason, name=name)
        else:
            folder.event("unfinished checkpoint", "its save was not completed, so it does not count", name=name)
    if checkpoint is None:
        # An interrupted save left nothing to resume from; damage is an error.
        damaged = [(name, reason) for name, reason in refused if spec.place.exists(f"{name}/{MANIFEST}")]
        if damaged:
            raise CheckpointError(
                f"No checkpoint of run {spec.name!r} can be used: {damaged[0][1]} To begin anew, give the run "
                "another name or delete its checkpoints."
            )
        return Beginning(None)
    done = checkpoint.manifest.step
    changes, versions = goes_on(
        spec.place, spec.name, spec.settings, done=done, num_steps=spec.num_steps, resume=spec.resume
    )
    check_position(checkpoint.manifest, spec.sample_order)
    if versions:
        folder.event("continue", versions, step=done)
    for change in changes:
        if change.step == done and spec.resume:
            for line in change.lines:
                folder.event("change", line, step=done)
    return Beginning(checkpoint, fresh_after(changes, done), changes)


def refuse_another_run(place: Place, name: str, settings: RunIdentity, num_steps: int, resume: bool | None) -> None:
    """Raise ConfigError if the folder has another run, with one line for each difference, before anything is started.

    ``beginning`` verifies checksums later. ``settings`` is the identity of the submitted run; for ``num_steps`` and
    ``resume`` see ``goes_on``.
    """
    done = newest_step(place)
    if done is not None:
        goes_on(place, name, settings, done=done, num_steps=num_steps, resume=resume)
