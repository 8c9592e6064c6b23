"""One step of the controller: (state, what a step showed, config) -> (state, decisions). No clock, no chance, no I/O.

A step passes through the parts in their order. Each may change the state and add decisions:

    note           counts the step, measures the stages' memory
    time           keeps the seconds of a step that may be compared
    change         a link or a stage has changed: DRIFT
    end_quiet      the time without switches is over
    judge          compares the steps of a trial: PAID, UNDO or OPEN
    search_again   scores all candidates on what is measured now: KEEP, WAIT or SWITCH
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from raypipe.ir.plan_table import human_s
from raypipe.planner.control.choice import Choice
from raypipe.planner.control.comparison import Comparison, typical_s
from raypipe.planner.control.config import ControllerConfig
from raypipe.planner.control.drift import News
from raypipe.planner.control.events import ControllerDecision, StepDone, Verdict
from raypipe.planner.control.measured import Measured
from raypipe.planner.control.memory_budget import fits
from raypipe.planner.control.observer import Observed
from raypipe.planner.control.search import Found, search
from raypipe.planner.control.states import Confirm, Known, Measure, Quiet, State, Trial
from raypipe.planner.control.words import gains, numbers_of, outcome, sentence, why
from raypipe.planner.tolerance import EVEN

__all__ = ["PARTS", "Heard", "after"]

RECENT = 8
"""Steps that a switch is compared with."""
SETTLE = 1
"""Steps of a run before the first search."""
REMEMBER_INTERVALS = 8
"""Intervals for which the controller keeps what messages took before they were compressed. A change that compressed
messages show ends that at once. One that they do not show, because they pass a token bucket anyway, is found by trying
without the codec, this seldom."""
MOST_DOUBLINGS = 4
"""Of the quiet time after switches that did not pay, so that a change that no measurement shows is found at last."""
OWN_CHANGE = 6
"""A change of links within so many steps after a switch was taken back is taken for its consequence: the driver is up
to three steps ahead with its orders, and a change shows after two."""
MOST_NEWS_SEARCHES = 3
"""Searches per interval that news may cause. On a link that is never the same there would be one after every step."""


class Heard(NamedTuple):
    """A step, and what it says.

    Attributes:
        done: the event.
        seen: what is new about links and stages.
        measure: the estimates at this moment, without what is remembered; None while a stage has not been heard of.
    """

    done: StepDone
    seen: Observed
    measure: Callable[[], Measured | None]


def after(state: State, heard: Heard, config: ControllerConfig) -> tuple[State, list[ControllerDecision]]:
    """The state after one more step, and what was decided, in order."""
    decisions = list[ControllerDecision]()
    for part in PARTS:
        state, more = part(state, heard, config)
        decisions.extend(more)
    return state, decisions


Answer = tuple[State, list[ControllerDecision]]


def _note(state: State, heard: Heard, config: ControllerConfig) -> Answer:
    """Count the step. Where a stage is found to need more memory than it has, search at once."""
    done, known = heard.done, state.known
    if done.step <= known.step:  # a run that goes on from an older checkpoint
        known = known.rewound()
        state = Measure(known)
    memory = known.memory.after(done.choice, done.stages)
    tight = memory.budgets != known.memory.budgets and not fits(done.choice, memory.budgets)
    first = done.step + SETTLE if known.steps == 0 else known.search_at
    since = done.step - config.retune_interval_steps
    known = replace(
        known,
        memory=memory,
        step=done.step,
        steps=known.steps + 1,
        search_at=done.step if tight else first,
        news_searches=tuple(step for step in known.news_searches if step > since),
    )
    if tight and isinstance(state, Quiet):
        return Measure(known), []
    return replace(state, known=known), []


def _time(state: State, heard: Heard, config: ControllerConfig) -> Answer:
    """Keep the step's seconds, if they may be compared with others."""
    done, known = heard.done, state.known
    if _in_flight(state, heard) or not done.counts:
        return state, []
    if isinstance(state, Trial) and state.comparison.began is None:
        return state, []  # in its first step with another choice the pipeline is neither full nor empty
    recent = (*known.recent, (done.step, done.seconds))[-RECENT:]
    return replace(state, known=replace(known, recent=recent)), []


def _change(state: State, heard: Heard, config: ControllerConfig) -> Answer:
    """What belongs to the links as they were is forgotten."""
    seen, step, known = heard.seen, heard.done.step, state.known
    if seen.news is not News.CHANGED or _in_flight(state, heard):
        return state, []
    uncompressed = known.uncompressed.at(step)
    if not isinstance(state, Trial):  # after a switch of its own a link may look changed without being so
        uncompressed = uncompressed.without(seen.links)
    # This step and the one before it have shown the change.
    recent = tuple(pair for pair in known.recent if pair[0] >= step - 1)
    known = replace(known, uncompressed=uncompressed, recent=recent)
    decision = ControllerDecision(step, Verdict.DRIFT, sentence(f"{seen.who} changed for good."), {"who": seen.who})
    if isinstance(state, Quiet) and step >= state.since + OWN_CHANGE:
        return Measure(replace(known, search_at=step)), [decision]
    return replace(state, known=known), [decision]


def _end_quiet(state: State, heard: Heard, config: ControllerConfig) -> Answer:
    if isinstance(state, Quiet) and heard.done.step >= state.until:
        return Measure(replace(state.known, search_at=heard.done.step)), []
    return state, []


def _judge(state: State, heard: Heard, config: ControllerConfig) -> Answer:
    """Whether the switch on trial paid."""
    done, known = heard.done, state.known
    if not isinstance(state, Trial) or _in_flight(state, heard):
        return state, []
    if heard.seen.news is News.CHANGED and state.comparison.began is not None:
        name, numbers = config.name(state.comparison.after), gains(state.comparison, config.name)
        reason = f"The links changed while {name} was on trial: whether it paid cannot be told."
        return Measure(known), [ControllerDecision(done.step, Verdict.OPEN, reason, numbers)]
    comparison = state.comparison.with_step(done.step, done.seconds, done.counts)
    paid = comparison.paid(config.min_gain)
    if paid is None:
        return Trial(known, comparison), []
    if not paid:
        return _taken_back(known, comparison, heard, config)
    reason = sentence(f"{outcome(comparison, config.name)}.")
    # Links are fuller now than when they were measured, and stages had time to settle: search again at once.
    known = replace(known, failed=0, search_at=done.step)
    return Measure(known), [ControllerDecision(done.step, Verdict.PAID, reason, gains(comparison, config.name))]


def _taken_back(known: Known, comparison: Comparison, heard: Heard, config: ControllerConfig) -> Answer:
    """Ask for what ran before, and be quiet: twice as long after each switch that did not pay, up to a limit."""
    step, failed = heard.done.step, known.failed + 1
    quiet = config.retune_interval_steps * 2 ** min(failed, MOST_DOUBLINGS)
    known = replace(_asking(known, comparison.before, heard, config), failed=failed)
    reason = f"{sentence(outcome(comparison, config.name))}. It did not pay: back, and no switch for {quiet} steps."
    decision = ControllerDecision(step, Verdict.UNDO, reason, gains(comparison, config.name), comparison.before)
    return Quiet(known, step, step + quiet), [decision]


def _search_again(state: State, heard: Heard, config: ControllerConfig) -> Answer:
    """Score all candidates, where it is time to or something is new."""
    done = heard.done
    if not _due(state, heard) or (measured := heard.measure()) is None:
        return state, []
    known = _searched(state, heard, config)
    measured = known.uncompressed.at(done.step).added_to(measured, _ratios(config, done.choice, measured))
    found = search(replace(config, budgets=known.memory.budgets), measured, done.choice)
    look = _judged_search(found, known, heard, config)
    best = found.best.choice
    if look.verdict is Verdict.KEEP:
        state = Measure(known)
    elif look.too_large:
        state = Measure(_asking(known, best, heard, config))
    elif isinstance(state, Confirm):
        comparison = Comparison(done.choice, best, look.gain, look.recent_s)
        state = Trial(_asking(known, best, heard, config), comparison)
    else:
        look = look._replace(verdict=Verdict.WAIT, text=f"{look.text} It is used if the next step agrees.")
        state = Confirm(known)
    numbers = numbers_of(found, measured, look.gain, typical_s(look.recent_s), config.name)
    return state, [
        ControllerDecision(
            done.step, look.verdict, look.text, numbers, best if look.verdict is Verdict.SWITCH else None
        )
    ]


class _Look(NamedTuple):
    """What a search says.

    Attributes:
        verdict: KEEP or SWITCH.
        gain: of the best choice over what runs, relative.
        recent_s: steps that it is compared with.
        too_large: what runs does not fit into memory.
        text: for people.
    """

    verdict: Verdict
    gain: float
    recent_s: tuple[float, ...]
    too_large: bool
    text: str


def _judged_search(found: Found, known: Known, heard: Heard, config: ControllerConfig) -> _Look:
    """Whether the best choice is worth a switch."""
    done, best = heard.done, found.best
    recent_s = known.recent_s
    if heard.seen.news is News.SUSPECT or not recent_s:
        recent_s = (done.seconds,)
    # Whatever the model does not explain is there with every candidate.
    rest_s = max(0.0, typical_s(recent_s) - found.current.seconds)
    gain = (found.current.seconds + rest_s) / (best.seconds + rest_s) - 1.0
    text = why(found, gain, heard.seen.who, config.name)
    differs = best.choice != done.choice
    too_large = differs and not fits(done.choice, known.memory.budgets)
    drops_codecs = done.choice.lossy and not best.choice.lossy and best.seconds <= found.current.seconds * (1 + EVEN)
    # The prediction for the best must be below what a step is measured to take, whatever the model says of now.
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


def _due(state: State, heard: Heard) -> bool:
    """Whether to search after this step."""
    if isinstance(state, Trial | Quiet) or _in_flight(state, heard):
        return False
    return _due_anyway(state, heard) or _due_for_news(state.known, heard)


def _due_anyway(state: State, heard: Heard) -> bool:
    return isinstance(state, Confirm) or heard.done.step >= state.known.search_at


def _due_for_news(known: Known, heard: Heard) -> bool:
    if heard.seen.news is News.STEADY or known.steps <= SETTLE:
        return False
    return len(known.news_searches) < MOST_NEWS_SEARCHES


def _in_flight(state: State, heard: Heard) -> bool:
    """Whether the step still ran with another choice than the one that was asked for."""
    return heard.done.choice != state.known.wanted


def _searched(state: State, heard: Heard, config: ControllerConfig) -> Known:
    """After one more search. A run's first steps are slow and unlike all others: while it is young, search sooner."""
    known, step, interval = state.known, heard.done.step, config.retune_interval_steps
    for_news = known.news_searches if _due_anyway(state, heard) else (*known.news_searches, step)
    return replace(known, news_searches=for_news, search_at=step + min(interval, known.steps))


def _asking(known: Known, choice: Choice, heard: Heard, config: ControllerConfig) -> Known:
    """After another choice was asked for."""
    step, uncompressed = heard.done.step, known.uncompressed
    if (measured := heard.measure()) is not None:
        until = step + REMEMBER_INTERVALS * config.retune_interval_steps
        uncompressed = uncompressed.at(step).after_switch(heard.done.choice, choice, measured, until)
    return replace(known, wanted=choice, recent=(), uncompressed=uncompressed)


def _ratios(config: ControllerConfig, choice: Choice, measured: Measured) -> list[float]:
    """By place, how many times smaller the codecs of a choice make a message."""
    ways = [{codec.name: codec.ratio for codec in codecs} for codecs in (config.forward_codecs, config.backward_codecs)]
    places = range(len(measured.links))
    return [ways[p % 2].get(choice.codec(measured.hop_of(p), p % 2 == 0), 1.0) for p in places]


PARTS = (_note, _time, _change, _end_quiet, _judge, _search_again)
"""Of a step, in order."""
