"""Event handling of the controller: from the event of a step to decisions for the next flush.

    StepDone --> Observer.add --> after(state, event, setup) ------------------> new state, decisions
                 estimates of       states.py has the four states
                 links, stages

Controller holds the measurements and the state, the only values that persist between steps. Equal events give equal
decisions. A restarted driver begins with the choice (schedule and codecs) and the memory budgets that were saved, and
measures anew.

``after`` has no clock, randomness or I/O. A step passes through its parts in their order. Each may change the state and
add decisions:

    _note           counts the step, and corrects the memory budgets by measured peaks
    _time           keeps the seconds of the step if they may be compared with others
    _change         after a change of a link or a stage: forgets what was measured before, and decides DRIFT
    _end_quiet      ends the state Quiet when its time is over
    _judge          compares the steps of a trial with those before it, and decides PAID, UNDO or OPEN
    _search_again   scores all candidates on the present measurements, and decides KEEP, WAIT or SWITCH
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from raypipe.errors import PlanError
from raypipe.ir.communication import LinkEstimate
from raypipe.ir.units import human_s
from raypipe.planner.controller.change_detection import DriftState
from raypipe.planner.controller.config import ControllerConfig
from raypipe.planner.controller.events import Choice, ControllerDecision, StepDone, Verdict
from raypipe.planner.controller.measured import Measured
from raypipe.planner.controller.memory_budget import PeakMemory, fits
from raypipe.planner.controller.observer import Observed, Observer
from raypipe.planner.controller.retuning import SearchResult, agrees, search
from raypipe.planner.controller.states import (
    RECENT,
    Comparison,
    Confirm,
    Known,
    Measure,
    Quiet,
    State,
    Trial,
    state_from_dict,
    state_to_dict,
    typical_s,
)
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.replay import routes_of

FORMAT = 4
"""Version of the saved state's format."""


class Controller:
    """Controller of a run: handles StepDone events, and returns decisions for the next flush (empty pipeline)."""

    def __init__(self, setup: ControllerConfig) -> None:
        self.setup = setup
        routes = routes_of(setup.choice.spec, len(setup.budgets))
        self._observer = Observer(routes, setup.choice.num_microbatches, setup.link_drift_threshold)
        self._state: State = Measure(Known(setup.choice, PeakMemory(setup.budgets)))

    @property
    def state(self) -> State:
        """Present state, one of the four in ``states``."""
        return self._state

    @property
    def wanted(self) -> Choice:
        """Choice that the run should use; a restarted driver begins with it."""
        return self._state.known.wanted

    def estimates(self) -> tuple[LinkEstimate, ...]:
        """Return the estimates of every hop and direction, for metrics and reports."""
        return self._observer.estimates()

    def handle(self, event: StepDone) -> list[ControllerDecision]:
        """Handle a completed step, and change the state accordingly.

        Returns:
            the decisions in order. If one has a ``choice``, the driver has to run it from the next flush on.
        """
        step = StepInput(event, self._observer.add(event), self._observer.measured)
        self._state, decisions = after(self._state, step, self.setup)
        return decisions

    def to_json(self) -> str:
        """Serialize what a restarted driver needs."""
        return json.dumps({"format": FORMAT, "setup": self.setup.identity, "state": state_to_dict(self._state)})

    @classmethod
    def from_json(cls, setup: ControllerConfig, text: str) -> Controller:
        """Restore a controller from the text of ``to_json``.

        Raises:
            PlanError: the text is no such state, or was written by another release or with another setup. A new
                controller may be used instead.
        """
        try:
            saved = json.loads(text)
            if saved.get("format") != FORMAT:
                raise ValueError("another release of raypipe has written it")
            if saved["setup"] != setup.identity:
                raise ValueError("it was written by a run with other stages, limits or settings")
            controller = cls(setup)
            controller._state = state_from_dict(saved["state"], setup.budgets)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"The saved state of the controller cannot be used by a run of {len(setup.budgets)} stages ({error}): "
                "begin without it, and the links are measured anew."
            ) from None
        return controller


Name = Callable[[Choice], str]
"""Function that describes a choice in words."""


def why(result: SearchResult, gain: float, who: str, name: Name) -> str:
    """Describe the result of a search in a sentence.

    Args:
        gain: relative gain of the best choice over the current one.
        who: names of the links and stages whose change caused the search; "" if no change did.
        name: describes a choice in words.
    """
    occasion = f"{who} changed: " if who else ""
    best, current = name(result.best.choice), name(result.current.choice)
    if result.best.choice == result.current.choice:
        text = f"{occasion}{current} stays, no other is faster than its {human_s(result.current.seconds)} a step"
    else:
        text = (
            f"{occasion}{best} would take {human_s(result.best.seconds)} a step, {current} "
            f"takes {human_s(result.current.seconds)}: a gain of {gain:.1%}"
        )
    if result.best.choice.lossy:
        text += f"; without codecs the best is {name(result.lossless.choice)} with {human_s(result.lossless.seconds)}"
    if result.limit:
        text += f"; {result.limit}"
    return sentence(f"{text}.")


def sentence(text: str) -> str:
    """Capitalize the first letter."""
    return f"{text[0].upper()}{text[1:]}"


def numbers_of(result: SearchResult, measured: Measured, gain: float, measured_s: float, name: Name) -> dict[str, Any]:
    """Convert the result of a search to ``ControllerDecision.numbers``.

    Args:
        gain: relative gain of the best choice over the current one.
        measured_s: measured seconds of a step.
        name: describes a choice in words.

    Returns:
        values by name. Seconds of links are listed by hop and direction, for the slowest link of each hop.
    """
    return {
        "current": name(result.current.choice),
        "best": name(result.best.choice),
        "current_s": result.current.seconds,
        "predicted_s": result.best.seconds,
        "measured_s": measured_s,
        "gain": gain,
        "candidates": result.tried,
        "link_s": measured.slowest_s(lambda link: link.transfer_s),
        "link_p90_s": measured.slowest_s(lambda link: link.p90_s),
        "limit": result.limit,
    }


def outcome(trial: Comparison, name: Name) -> str:
    """Describe the predicted and achieved gain of a switch in a sentence without a full stop."""
    return (
        f"{name(trial.after)} takes {human_s(typical_s(trial.after_s))} a step, {name(trial.before)} took "
        f"{human_s(typical_s(trial.before_s))}: a gain of {trial.achieved_gain:.1%}, where {trial.predicted_gain:.1%} "
        "was predicted"
    )


def gains(trial: Comparison, name: Name) -> dict[str, Any]:
    """Convert the predicted and achieved gain of a switch to ``ControllerDecision.numbers``."""
    return {
        "before": name(trial.before),
        "after": name(trial.after),
        "before_s": typical_s(trial.before_s),
        "after_s": typical_s(trial.after_s),
        "predicted_gain": trial.predicted_gain,
        "achieved_gain": trial.achieved_gain,
    }


SETTLE = 1
"""Steps at the beginning of a run in which a change of links or stages causes no search of its own."""
REMEMBER_INTERVALS = 8
"""Retune intervals for which the controller keeps the seconds of messages before they were compressed. They are
discarded at once if compressed messages show a change of the link. Compressed messages may hide a change, because small
messages pass a token bucket anyway; it is found by trying without the codec after this time."""
MOST_DOUBLINGS = 4
"""Most doublings of the quiet time after failed switches."""
OWN_CHANGE = 6
"""Steps after an undone switch within which a change of links is attributed to the switch itself: the driver is up to
three steps ahead with its requests, and a change is detected after two."""
SEEN = 2
"""Steps with another choice after which it must have shown up in the estimates of links."""
SLOWER = 2.0
"""Steps that are slower than at the last search by this multiple of ``min_gain`` cause another one: links that become
slower little by little never seem to change."""
LEAST_SHARE = 0.1
"""Least seconds of a message that changes are relative to, over those of a micro-batch on the slowest stage."""
MOST_NEWS_SEARCHES = 3
"""Most searches per retune interval that changes of links or stages may cause, in addition to the regular ones."""


class StepInput(NamedTuple):
    """Step and its measurements.

    Attributes:
        done: event of the step.
        seen: changes of links and stages in this step.
        measure: returns the present estimates, without ``Known.uncompressed``; None until every worker has reported.
    """

    done: StepDone
    seen: Observed
    measure: Callable[[], Measured | None]


def after(state: State, event: StepInput, config: ControllerConfig) -> tuple[State, list[ControllerDecision]]:
    """Return the state after one more step, and the decisions in order."""
    decisions = list[ControllerDecision]()
    for part in PARTS:
        state, more = part(state, event, config)
        decisions.extend(more)
    return state, decisions


Answer = tuple[State, list[ControllerDecision]]


def _note(state: State, event: StepInput, config: ControllerConfig) -> Answer:
    """Count the step, and correct the memory budgets; a search is due at once if the step's choice no longer fits."""
    done, known = event.done, state.known
    if done.step <= known.step:  # the run has rolled back
        known = known.rewound()
        state = Measure(known)
    memory = known.memory.after(done.choice, done.stages)
    tight = memory.budgets != known.memory.budgets and not fits(done.choice, memory.budgets)
    since = done.step - config.retune_interval_steps
    known = replace(
        known,
        memory=memory,
        step=done.step,
        steps=known.steps + 1,
        search_at=done.step if tight or known.steps == 0 else known.search_at,
        news_searches=tuple(step for step in known.news_searches if step > since),
    )
    if tight and isinstance(state, Quiet):
        return Measure(known), []
    return replace(state, known=known), []


def _time(state: State, event: StepInput, config: ControllerConfig) -> Answer:
    """Keep the step's seconds if they may be compared with others."""
    done, known = event.done, state.known
    if _in_flight(state, event) or not done.counts:
        return state, []
    if isinstance(state, Trial) and state.comparison.began is None:
        return state, []  # the first step with another choice is not typical
    recent = (*known.recent, (done.step, done.seconds))[-RECENT:]
    return replace(state, known=replace(known, recent=recent)), []


def _change(state: State, event: StepInput, config: ControllerConfig) -> Answer:
    """Forget what was measured before a change of a link or stage, and decide DRIFT; do nothing without a change."""
    seen, step, known = event.seen, event.done.step, state.known
    if seen.news is not DriftState.CHANGED or _in_flight(state, event):
        return state, []
    uncompressed = known.uncompressed.at(step)
    if not isinstance(state, Trial):  # after a switch a link may seem changed though it is not
        uncompressed = uncompressed.without(seen.links)
    # This step and the one before it have shown the change.
    recent = tuple(pair for pair in known.recent if pair[0] >= step - 1)
    known = replace(known, uncompressed=uncompressed, recent=recent)
    decision = ControllerDecision(step, Verdict.DRIFT, sentence(f"{seen.who} changed for good."), {"who": seen.who})
    if isinstance(state, Quiet) and step >= state.since + OWN_CHANGE:
        return Measure(replace(known, search_at=step)), [decision]
    if isinstance(state, Quiet):
        state = replace(state, drifted=step)
    return replace(state, known=known), [decision]


def _end_quiet(state: State, event: StepInput, config: ControllerConfig) -> Answer:
    """End the state Quiet when its time is over, or if the links are not as they were before the undone switch."""
    if not isinstance(state, Quiet):
        return state, []
    step = event.done.step
    # The switch back shows up as a change, until which estimates are those of the trial; at most SEEN steps after it.
    seen = len(state.known.recent) == SEEN if state.drifted is None else step > state.drifted
    if step >= state.until or (seen and _differ(state.links_s, event, config)):
        return Measure(replace(state.known, search_at=step)), []
    return state, []


def _differ(links_s: Sequence[float], event: StepInput, config: ControllerConfig) -> bool:
    """Return True if the seconds of messages on some link have changed since a switch.

    Args:
        links_s: ``Comparison.links_s`` of the switch, measured before it.
    """
    measured = event.measure()
    if measured is None or not links_s:
        return False
    now_s = measured.slowest_s(lambda link: link.transfer_s)
    floor_s = LEAST_SHARE * max(measured.busy_s)
    pairs = zip(links_s, now_s, strict=True)
    return any(abs(now - then) > config.link_drift_threshold * max(then, floor_s) for then, now in pairs)


def _judge(state: State, event: StepInput, config: ControllerConfig) -> Answer:
    """Decide PAID, UNDO or OPEN for the switch on trial, as soon as it can be judged."""
    done, known = event.done, state.known
    if not isinstance(state, Trial):
        return state, []
    if _in_flight(state, event):
        changed = event.seen.news is DriftState.CHANGED
        comparison = state.comparison.with_earlier(done, since=done.step if changed else 0)
        return Trial(known, comparison), []
    comparison = state.comparison.with_step(done.step, done.seconds, done.counts)
    paid = comparison.paid(config.min_gain)
    moved = event.seen.news is DriftState.CHANGED and state.comparison.began is not None
    # With other codecs or micro-batches messages have other bytes, and links may seem changed though they are not.
    if moved or (paid is False and comparison.same_messages and _differ(comparison.links_s, event, config)):
        name, numbers = config.name(comparison.after), gains(state.comparison, config.name)
        reason = f"The links changed while {name} was on trial: it cannot be judged."
        return Measure(known), [ControllerDecision(done.step, Verdict.OPEN, reason, numbers)]
    if paid is None:
        return Trial(known, comparison), []
    if not paid:
        return _taken_back(known, comparison, event, config)
    reason = sentence(f"{outcome(comparison, config.name)}.")
    # Links are fuller now than when they were measured, and stages had time to settle: search again at once.
    known = replace(known, failed=0, search_at=done.step)
    return Measure(known), [ControllerDecision(done.step, Verdict.PAID, reason, gains(comparison, config.name))]


def _taken_back(known: Known, comparison: Comparison, event: StepInput, config: ControllerConfig) -> Answer:
    """Request the previous choice, and enter Quiet; each failed switch doubles the length of Quiet, up to a limit."""
    step, failed = event.done.step, known.failed + 1
    quiet = config.retune_interval_steps * 2 ** min(failed, MOST_DOUBLINGS)
    known = replace(_requested(known, comparison.before, event, config), failed=failed)
    reason = f"{sentence(outcome(comparison, config.name))}. It did not pay: back, and no switch for {quiet} steps."
    decision = ControllerDecision(step, Verdict.UNDO, reason, gains(comparison, config.name), comparison.before)
    return Quiet(known, step, step + quiet, comparison.links_s), [decision]


def _search_again(state: State, event: StepInput, config: ControllerConfig) -> Answer:
    """Score all candidates if a search is due, and decide KEEP, WAIT or SWITCH."""
    done = event.done
    if not _due(state, event, config) or (measured := event.measure()) is None:
        return state, []
    known = _searched(state, event, config)
    measured = known.uncompressed.at(done.step).added_to(measured, _ratios(config, done.choice, measured))
    config = replace(config, budgets=known.memory.budgets)
    opening = known.opens and done.choice == config.choice
    result = search(config.lossless if opening else config, measured, done.choice)
    look = _judged_search(result, known, event, config)
    known = replace(known, searched_s=typical_s(look.recent_s))
    best = result.best.choice
    if look.verdict is Verdict.KEEP:
        state = Measure(known)
    elif look.too_large or (opening and agrees(config, measured, result)):
        # Before a first switch there is only the run's start, which is no measure for a trial.
        state = Measure(_requested(known, best, event, config))
    elif isinstance(state, Confirm):
        links_s = tuple(measured.slowest_s(lambda link: link.transfer_s))
        comparison = Comparison(done.choice, best, look.gain, look.recent_s, links_s)
        state = Trial(_requested(known, best, event, config), comparison)
    else:
        look = look._replace(verdict=Verdict.WAIT, text=f"{look.text} It is used if the next step agrees.")
        steady = event.seen.news is DriftState.STEADY
        state = Confirm(known if steady else replace(known, recent=known.recent[-1:]))  # as in _searched
    numbers = numbers_of(result, measured, look.gain, typical_s(look.recent_s), config.name)
    return state, [
        ControllerDecision(
            done.step, look.verdict, look.text, numbers, best if look.verdict is Verdict.SWITCH else None
        )
    ]


class _Look(NamedTuple):
    """Judgement of a search's result.

    Attributes:
        verdict: KEEP or SWITCH.
        gain: relative gain of the best choice over the current one.
        recent_s: seconds of recent steps with the current choice.
        too_large: True if the current choice does not fit into memory.
        text: reason of the decision.
    """

    verdict: Verdict
    gain: float
    recent_s: tuple[float, ...]
    too_large: bool
    text: str


def _judged_search(result: SearchResult, known: Known, event: StepInput, config: ControllerConfig) -> _Look:
    """Decide SWITCH if the best choice is worth it, else KEEP."""
    done, best = event.done, result.best
    recent_s = known.recent_s
    if event.seen.news is DriftState.SUSPECT or not recent_s:
        recent_s = (done.seconds,)
    # Time that the model does not explain is added to every candidate, except the start of a run.
    rest_s = max(0.0, typical_s(recent_s) - result.current.seconds) if done.counts or not known.opens else 0.0
    gain = (result.current.seconds + rest_s) / (best.seconds + rest_s) - 1.0
    text = why(result, gain, event.seen.who, config.name)
    differs = best.choice != done.choice
    too_large = differs and not fits(done.choice, known.memory.budgets)
    drops_codecs = done.choice.lossy and not best.choice.lossy and best.seconds <= result.current.seconds * (1 + EVEN)
    # The best prediction must be below the measured step time, whatever the model predicts for the current choice.
    odd = differs and best.seconds > typical_s(recent_s) * (1 + config.min_gain)
    if too_large:
        text = f"{config.name(done.choice)} needs more memory than there is. {text}"
    elif odd:
        text = (
            f"{text} But steps are measured to take only {human_s(typical_s(recent_s))}: the prediction is not trusted."
        )
    wanted = too_large or (differs and not odd and (gain > config.min_gain or drops_codecs))
    if wanted and config.frozen:
        text = f"Frozen, else it would change. {text}"
    return _Look(Verdict.SWITCH if wanted and not config.frozen else Verdict.KEEP, gain, recent_s, too_large, text)


def _due(state: State, event: StepInput, config: ControllerConfig) -> bool:
    """Return True if a search is due after this step."""
    if isinstance(state, Trial | Quiet) or _in_flight(state, event):
        return False
    if _due_anyway(state, event, config):
        return True
    known = state.known
    return (
        event.seen.news is not DriftState.STEADY
        and known.steps > SETTLE
        and len(known.news_searches) < MOST_NEWS_SEARCHES
    )


def _due_anyway(state: State, event: StepInput, config: ControllerConfig) -> bool:
    slowed = state.known.slowed(SLOWER * config.min_gain)
    return slowed or isinstance(state, Confirm) or event.done.step >= state.known.search_at


def _in_flight(state: State, event: StepInput) -> bool:
    """Return True if a requested switch has not taken effect yet, because the step still ran with another choice."""
    return event.done.choice != state.known.wanted


def _searched(state: State, event: StepInput, config: ControllerConfig) -> Known:
    """Return ``state.known`` with the search of this step recorded, and the next one scheduled.

    The interval to the next search is the number of steps since the run began, up to ``retune_interval_steps``.
    """
    known, step, interval = state.known, event.done.step, config.retune_interval_steps
    for_news = known.news_searches if _due_anyway(state, event, config) else (*known.news_searches, step)
    # Earlier steps ran on other links, and a trial must not be compared with them.
    recent = known.recent[-2:] if known.slowed(SLOWER * config.min_gain) else known.recent
    return replace(known, recent=recent, news_searches=for_news, search_at=step + min(interval, known.steps))


def _requested(known: Known, choice: Choice, event: StepInput, config: ControllerConfig) -> Known:
    """Return ``known`` with ``choice`` as the requested choice.

    If ``choice`` compresses messages that are not compressed now, the result keeps their measured seconds.
    """
    step, uncompressed = event.done.step, known.uncompressed
    if (measured := event.measure()) is not None:
        until = step + REMEMBER_INTERVALS * config.retune_interval_steps
        uncompressed = uncompressed.at(step).after_switch(event.done.choice, choice, measured, until)
    return replace(known, wanted=choice, recent=(), news_searches=(), uncompressed=uncompressed)


def _ratios(config: ControllerConfig, choice: Choice, measured: Measured) -> list[float]:
    """List the compression ratios of a choice's codecs, in the order of ``measured.links``."""
    ways = [{codec.name: codec.ratio for codec in codecs} for codecs in (config.forward_codecs, config.backward_codecs)]
    places = range(len(measured.links))
    return [ways[p % 2].get(choice.codec(measured.hop_of(p), p % 2 == 0), 1.0) for p in places]


PARTS = (_note, _time, _change, _end_quiet, _judge, _search_again)
"""Parts of ``after``, in their order."""
