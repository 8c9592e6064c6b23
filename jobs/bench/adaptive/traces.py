"""Simulated traces of links: the controller's steps against those of the best fixed plan of each trace.

A trace gives the seconds of every message, by hop, direction, step and micro-batch. The controlled run begins with
1F1B. Its first step runs alone; later its choices take effect ``lag`` steps after the step that follows the decision,
because a driver is ahead with its orders. Fixed plans are 1F1B and slack by hop, as far as memory allows; the best one
is known in hindsight only.

Seconds are those of ``tests.planner.controller.lab``, which shares no code with the planner's simulator. Fixed plans
are ranked by the controller's replay, which is quicker and as exact, and the best of them run through the lab.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, CodecCost, Controller, ControllerConfig, MemoryBudget, Verdict
from raypipe.planner.replay import Wire, compiled, step_s
from tests.planner.controller.lab import Link, Pipeline, all_choices, run_controlled, run_fixed

STEPS = 200
LAG = 2
"""Steps that the driver is ahead of the decisions: it has sent three orders before it reads the report of the first."""
BEST = 3
"""Fixed plans, the best by the replay, that run through the lab."""
NOISE, STAMP_NOISE_S = 0.01, 2e-4
COUNT = 16
FOUR, TWO = ((0.010, 0.020),) * 4, ((0.018, 0.035),) * 2
LAN = (0.002, 0.0002)
"""Occupancy and latency of a message of 256 KiB on 1 Gbit/s."""

State = Callable[[int, int, bool, int], tuple[float, float]]
"""(value, hop, forward, micro-batch) -> (occupancy_s, latency_s)."""


@dataclass(frozen=True)
class Trace:
    """Links that may change while a run trains.

    Attributes:
        value: step -> number of the links' state; equal numbers mean equal links.
        state: seconds of a message in a state.
        stages: (forward_s, backward_s) by stage.
        lasting: True if the links change for good, so that no fixed plan fits all steps.
        most_in_flight: micro-batches that each stage may hold.
        most_slack: largest slack of a hop in fixed plans.
    """

    value: Callable[[int], int]
    state: State
    stages: Sequence[tuple[float, float]] = FOUR
    lasting: bool = False
    most_in_flight: int = 4 * len(FOUR)
    most_slack: int = 5

    @property
    def config(self) -> ControllerConfig:
        """Controller with default thresholds, which begins with 1F1B."""
        budgets = (MemoryBudget(most_in_flight=self.most_in_flight),) * len(self.stages)
        return ControllerConfig("auto", Choice(ScheduleSpec("1f1b", COUNT)), budgets)

    def link(self) -> Link:
        """Return the links as the lab takes them."""
        return lambda hop, forward, step, m: self.state(self.value(step), hop, forward, m)

    def pipeline(self) -> Pipeline:
        """Build a pipeline on these links, always with the same noise."""
        return Pipeline(self.stages, self.link(), noise=NOISE, stamp_noise_s=STAMP_NOISE_S)

    def replayed_s(self, choice: Choice) -> float:
        """Compute the seconds of all steps with one choice, without noise."""
        values = [self.value(step) for step in range(STEPS)]
        seconds = {value: self._step_s(choice, value) for value in set(values)}
        return sum(seconds[value] for value in values)

    def _step_s(self, choice: Choice, value: int) -> float:
        wires = [
            Wire(self.state(value, hop, way, 0)[1], tuple(self.state(value, hop, way, m)[0] for m in range(COUNT)))
            for hop in range(len(self.stages) - 1)
            for way in (True, False)
        ]
        forward_s, backward_s = zip(*self.stages, strict=True)
        return step_s(compiled(choice.spec, len(self.stages)), forward_s, backward_s, wires)


def steady(occupancy_s: float, latency_s: float, *, only: int | None = None) -> State:
    """Make links that carry every message alike; ``only`` names a hop, and other hops are a LAN."""
    return lambda value, hop, forward, m: (occupancy_s, latency_s) if only in (None, hop) else LAN


def shared(busy_share: float) -> State:
    """Make links on which a competitor halves the rate of a share of the messages, in bursts of three."""

    def state(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
        busy = Random(f"{value} {forward} {m // 3}").random() < busy_share
        return 0.008 * (2 if busy else 1), 0.0003

    return state


def late(share: float, late_s: float) -> State:
    """Make links on which a share of the messages is late by up to twice ``late_s``."""

    def state(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
        random = Random(f"{value} {hop} {forward} {m}")
        return 0.002 + (random.uniform(0, 2 * late_s) if random.random() < share else 0.0), 0.0005

    return state


def by_value(seconds: Sequence[float], hop: int | None = None, latency_s: float = 2e-4) -> State:
    """Make links whose occupancy is ``seconds[value]``, on one hop or on all."""
    return lambda value, at, forward, m: (seconds[value], latency_s) if hop in (None, at) else LAN


def moving(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
    """Return the seconds of links of which the one with the state's number takes 25 ms for each message."""
    return (0.025 if hop == value else 0.0), 0.0002


def up_to(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
    """Return the seconds of links that take 25 ms up to the hop with the state's number, and 2 ms beyond it."""
    return (0.025 if hop <= value else 0.002), 0.0003


def regions(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
    """Return the seconds of links inside two regions, 20 ms, and of the one between them, 100 ms."""
    return 0.008, (0.100 if hop == 1 else 0.020)


def jitter(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
    """Return the seconds of links of 40 ms whose messages take up to twice as long as the shortest, in pairs."""
    return 0.008 * (1 + Random(f"{value} {hop} {forward} {m // 2}").random()), 0.040


def rerouted(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
    """Return the seconds of links whose latency changes from 20 to 100 ms."""
    return 0.010, (0.020, 0.100)[value]


def diurnal(step: int) -> int:
    """Return a number from 0 to 10 and back within 100 steps."""
    return round(5 - 5 * math.cos(step * math.tau / 100))


def burst(step: int) -> int:
    """Return 1 in bursts of three steps, one in eight of which is busy, else 0."""
    return int(Random(step // 3).random() < 0.125)


def asymmetric(value: int, hop: int, forward: bool, m: int) -> tuple[float, float]:
    """Return the seconds of links that take 24 ms forward and 3 ms backward."""
    return (0.024 if forward else 0.003), 0.001


TRACES = {
    "calm": Trace(lambda step: 0, steady(*LAN)),
    "free": Trace(lambda step: 0, steady(0.0, 0.0001)),
    "slow": Trace(lambda step: 0, steady(0.042, 0.0003), TWO),
    "ethernet": Trace(lambda step: step % 16, shared(0.8)),
    "WAN": Trace(lambda step: 0, steady(0.010, 0.030)),
    "WAN, little memory": Trace(lambda step: 0, steady(0.010, 0.030), most_in_flight=8),
    "WAN 20 ms": Trace(lambda step: 0, steady(0.010, 0.020), most_slack=13),
    "WAN 50 ms": Trace(lambda step: 0, steady(0.010, 0.050), most_slack=13),
    "WAN 100 ms": Trace(lambda step: 0, steady(0.010, 0.100), most_slack=13),
    "WAN two regions": Trace(lambda step: 0, regions, most_slack=13),
    "WAN jitter": Trace(lambda step: step % 4, jitter, most_slack=13),
    "WAN rerouted": Trace(lambda step: int(step >= 60), rerouted, most_slack=13),
    "two sites": Trace(lambda step: 0, steady(0.010, 0.040, only=1)),
    "one bad hop": Trace(lambda step: 0, steady(0.030, 0.001, only=2)),
    "asymmetric": Trace(lambda step: 0, asymmetric),
    "late messages": Trace(lambda step: step % 16, late(0.15, 0.03)),
    "bursts": Trace(burst, by_value((0.002, 0.025), 1)),
    "flapping": Trace(lambda step: step // 10 % 2, by_value((0.010, 0.024))),
    "diurnal": Trace(diurnal, by_value([0.0025 * i for i in range(11)])),
    "spikes": Trace(lambda step: int(step % 15 == 14), by_value((0.002, 0.040))),
    "outage": Trace(lambda step: int(80 <= step < 110), by_value((0.002, 0.050), 1)),
    "moving": Trace(lambda step: step // 50, moving, lasting=True, most_in_flight=6),
    "slower at 60": Trace(lambda step: int(step >= 60), by_value((0.001, 0.028), 1)),
    "free at 60": Trace(lambda step: int(step < 60), by_value((0.0, 0.040), 1), lasting=True),
    "ramp": Trace(lambda step: step // 25, by_value([0.004 * i for i in range(8)])),
    "link after link": Trace(lambda step: min(step // 60, 2), up_to, lasting=True),
}


class Result(NamedTuple):
    """Seconds of one trace.

    Attributes:
        own_s: seconds of the steps of the controlled run.
        fixed_s: seconds of the best fixed plan.
        best: name of that plan.
        switches, undone: number of decisions.
        first: first step that ran with another choice than 1F1B; STEPS if none did.
    """

    own_s: list[float]
    fixed_s: list[float]
    best: str
    switches: int
    undone: int
    first: int

    @property
    def ratio(self) -> float:
        """Seconds of the best fixed plan over those of the controlled run; above 1 if the controller is quicker."""
        return sum(self.fixed_s) / sum(self.own_s)


def run_trace(trace: Trace, lag: int = LAG) -> Result:
    """Run one trace with the controller, and with the best fixed plans."""
    config = trace.config
    own_s, choices, decisions = run_controlled(trace.pipeline(), config, STEPS, lag)
    every = [choice for choice in all_choices(config, COUNT, trace.most_slack) if choice.spec.kind != "kfkb"]
    best = heapq.nsmallest(BEST, every, trace.replayed_s)
    fixed = {str(choice): run_fixed(trace.pipeline(), choice, STEPS) for choice in best}
    name = min(fixed, key=lambda one: sum(fixed[one]))
    verdicts = [decision.verdict for decision in decisions]
    first = next((step for step, choice in enumerate(choices) if choice != config.choice), STEPS)
    return Result(own_s, fixed[name], name, verdicts.count(Verdict.SWITCH), verdicts.count(Verdict.UNDO), first)


BF16 = (CodecCost("bf16", 2.0),)
WAITED = 40
"""Steps after a change for which the answer is waited for."""


def locked_out(changes: Collection[int], lag: int = LAG) -> dict[int, int]:
    """Measure how fast a change is answered after switches that did not pay.

    A codec is switched on and undone again and again, because messages take 25 ms whatever their size, and the
    controller pauses longer each time. From the step of the change on they take 60 ms, and half with the codec.

    Args:
        changes: steps of the change, each in a run of its own.
        lag: steps that the driver is ahead, as in ``run_trace``.

    Returns:
        steps from each change to the switch that answers it; or from the undo that follows it, if the codec was in use
        at the change. WAITED without an answer.
    """
    budgets = tuple(MemoryBudget(most_in_flight=most) for most in (6, 16, 16, 16))
    choice = Choice(ScheduleSpec("1f1b", COUNT))
    config = ControllerConfig("1f1b", choice, budgets, BF16, BF16, retune_interval_steps=5)
    vain, paying = (
        Pipeline(FOUR, _on_hop_0(seconds), codecs={"bf16": ratio}) for seconds, ratio in ((0.025, 1.0), (0.060, 2.0))
    )
    controller, queue, answers = Controller(config), [choice], dict[int, int]()
    for step in range(max(changes) + 1):
        if step in changes:
            answers[step] = _answer(deepcopy(controller), list(queue), paying, step)
        controller.handle(vain.step(step, queue.pop(0)))
        queue = [*queue, controller.wanted] if step else [controller.wanted] * (lag + 1)
    return answers


def _on_hop_0(seconds: float) -> Link:
    return lambda hop, forward, step, m: (seconds if hop == 0 else 0.0, 0.0)


def _answer(controller: Controller, queue: list[Choice], pipeline: Pipeline, change: int) -> int:
    """Return the steps from ``change``, or from a later undo, to a switch."""
    since = change
    for step in range(change, change + WAITED):
        verdicts = [decision.verdict for decision in controller.handle(pipeline.step(step, queue.pop(0)))]
        if Verdict.SWITCH in verdicts:
            return step - since
        since = step if Verdict.UNDO in verdicts else since
        queue.append(controller.wanted)
    return WAITED
