"""A pipeline on paper for the controller to steer: stages that take their time, links in order, clocks that disagree.

It is written on its own, action by action, and knows nothing of the planner's
simulation or of the controller's replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from random import Random

from raypipe.ir.communication import LinkSample, StageSample
from raypipe.ir.schedule import COMPUTE, Op, Schedule
from raypipe.planner.controller import Choice, Controller, ControllerConfig, ControllerDecision, StepDone, fits
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower

Link = Callable[[int, bool, int, int], tuple[float, float]]
"""(hop, forward, step, micro-batch) -> (occupancy_s, latency_s)."""
_Way = tuple[int, int]
"""Worker that sends, worker that receives."""


@dataclass
class Pipeline:
    """The truth.

    Attributes:
        stages: (forward_s, backward_s), of all replicas.
        link: see Link.
        nbytes: of a message.
        weight_shares: by stage, W over all of a split backward, which the stages then report; empty for 0.5, unsaid.
        splitting: seconds of a split backward over those of a whole one.
        noise: relative standard deviation of every stage's time.
        stamp_noise_s: of time stamps.
        clocks: (offset_s, seconds gained per second) by worker.
        lost: share of samples that nobody reports.
        codecs: ratio by name; encoding costs nothing.
        per_byte: a message takes from the wire what it has bytes; False takes as long whatever its size.
        bucket_bytes: that pass at once after a pause, as the kernel's token buckets and many clouds let them.
        shares: by M, a micro-batch's (seconds, bytes) over what ``stages``, ``link`` and ``nbytes`` say; else 1.
    """

    stages: Sequence[tuple[float, float]]
    link: Link
    nbytes: int = 262_144
    weight_shares: Sequence[float] = ()
    splitting: float = 1.0
    noise: float = 0.0
    stamp_noise_s: float = 0.0
    clocks: Sequence[tuple[float, float]] = ()
    lost: float = 0.0
    codecs: dict[str, float] = field(default_factory=dict)
    shares: dict[int, tuple[float, float]] = field(default_factory=dict)
    bucket_bytes: float = 0.0
    per_byte: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.now_s = 1000.0
        self._buckets: dict[_Way, tuple[float, float]] = {}

    def step(self, step: int, choice: Choice) -> StepDone:
        """Run one step and report it."""
        begin_s = self.now_s
        messages: list[LinkSample] = []
        arrival: dict[tuple[int, bool, int], float] = {}
        free: dict[_Way, float] = {}
        longer, larger = self.shares.get(choice.num_microbatches, (1.0, 1.0))
        lowered = _lowered(choice, len(self.stages))
        rows, wiring = lowered.rows(), lowered.wiring
        count = len(rows)
        clock, place = [begin_s] * count, [0] * count
        busy: list[dict[Op, list[float]]] = [{op: [] for op in COMPUTE} for _ in range(count)]
        moved = True
        while moved:
            moved = False
            for worker, row in enumerate(rows):
                while place[worker] < len(row):
                    stage, op, m = row[place[worker]]
                    if op in (Op.RECV_F, Op.RECV_B):
                        key = (stage - 1, True, m) if op is Op.RECV_F else (stage, False, m)
                        if key not in arrival:
                            break
                        clock[worker] = max(clock[worker], arrival[key])
                    elif op in (Op.SEND_F, Op.SEND_B):
                        forward = op is Op.SEND_F
                        hop = stage if forward else stage - 1
                        occupancy_s, latency_s = self.link(hop, forward, step, m)
                        ratio = self.codecs.get(choice.codec(hop, forward), 1.0) / larger
                        shorter = ratio if self.per_byte else 1.0
                        peer = wiring.worker_of(stage + 1 if forward else stage - 1, m)
                        way = worker, peer
                        begin = max(free.get(way, 0.0), clock[worker])
                        leave = begin + self._through_bucket(way, begin, occupancy_s, shorter)
                        free[way] = leave
                        arrival[hop, forward, m] = leave + latency_s
                        stamps = self._stamp(worker, clock[worker]), self._stamp(peer, leave + latency_s)
                        wire_bytes = round(self.nbytes / ratio)
                        raw_bytes = round(self.nbytes * larger)
                        messages.append(LinkSample(hop, forward, step, m, wire_bytes, *stamps, raw_bytes))
                    elif op in COMPUTE:
                        seconds = longer * self._work_s(stage, op) * max(0.2, self.random.gauss(1.0, self.noise))
                        clock[worker] += seconds
                        busy[worker][op].append(seconds)
                    place[worker] += 1
                    moved = True
        assert all(at == len(row) for at, row in zip(place, rows, strict=True)), "deadlock"
        self.now_s = max(clock)
        kept = [m for m in messages if self.random.random() >= self.lost]
        self.random.shuffle(kept)
        samples = tuple(
            self._sample(stage, step, longer, busy[worker])._replace(replica=replica)
            for stage, workers in enumerate(wiring.homes)
            for replica, worker in enumerate(workers)
        )
        return StepDone(step, self.now_s - begin_s, choice, samples, tuple(kept))

    def _work_s(self, stage: int, op: Op) -> float:
        forward_s, backward_s = self.stages[stage]
        share = self.weight_shares[stage] if self.weight_shares else 0.5
        both_s = self.splitting * backward_s
        parts = {Op.F: forward_s, Op.B: backward_s, Op.I: (1 - share) * both_s, Op.W: share * both_s}
        return parts[op]

    def _sample(self, stage: int, step: int, longer: float, busy: dict[Op, list[float]]) -> StageSample:
        forward_s, backward_s, input_s, weight_s = (
            sorted(busy[op])[len(busy[op]) // 2] if busy[op] else 0.0 for op in (Op.F, Op.B, Op.I, Op.W)
        )
        if busy[Op.W]:
            return StageSample(stage, step, forward_s, 0.0, input_s=input_s, weight_s=weight_s)
        parts = [longer * self._work_s(stage, op) if self.weight_shares else None for op in (Op.I, Op.W)]
        return StageSample(stage, step, forward_s, backward_s, input_s=parts[0], weight_s=parts[1])

    def _through_bucket(self, way: _Way, now_s: float, occupancy_s: float, ratio: float) -> float:
        """Seconds that a message takes from the wire; what is in the bucket passes at once."""
        if not self.bucket_bytes or not occupancy_s:
            return occupancy_s / ratio
        rate, wire = self.nbytes / occupancy_s, self.nbytes / ratio
        level, since_s = self._buckets.get(way, (self.bucket_bytes, now_s))
        level = min(self.bucket_bytes, level + (now_s - since_s) * rate)
        seconds = max(0.0, wire - level) / rate
        self._buckets[way] = max(0.0, level - wire), now_s + seconds
        return seconds

    def _stamp(self, worker: int, true_s: float) -> float:
        offset_s, gain = self.clocks[worker] if self.clocks else (0.0, 0.0)
        return true_s * (1 + gain) + offset_s + abs(self.random.gauss(0.0, self.stamp_noise_s))


@cache
def _lowered(choice: Choice, num_stages: int) -> Schedule:
    return lower(schedule_of(choice.spec, num_stages))


def run_fixed(pipeline: Pipeline, choice: Choice, steps: int) -> list[float]:
    """Seconds of each step with one choice."""
    return [pipeline.step(step, choice).seconds for step in range(steps)]


def run_controlled(
    pipeline: Pipeline,
    setup: ControllerConfig,
    steps: int,
    lag: int = 1,
    uncounted: Collection[int] = (),
) -> tuple[list[float], list[Choice], list[ControllerDecision]]:
    """Seconds, choice and decisions of a run; a choice takes effect ``lag`` steps after it was asked for.

    The first step runs alone, so that what is asked for after it takes effect at once.

    Args:
        uncounted: steps whose seconds may not be compared, because of a checkpoint, say.
    """
    controller = Controller(setup)
    queue = [setup.choice]
    seconds, choices, decisions = [], [], []
    for step in range(steps):
        choice = queue.pop(0)
        done = replace(pipeline.step(step, choice), counts=step not in uncounted)
        seconds.append(done.seconds)
        choices.append(choice)
        decisions.extend(controller.handle(done))
        queue = [*queue, controller.wanted] if step else [controller.wanted] * (lag + 1)
    return seconds, choices, decisions


def all_choices(setup: ControllerConfig, num_microbatches: int, most_slack: int) -> Iterable[Choice]:
    """Everything that fits: 1F1B, every k, and every r up to ``most_slack`` on each hop."""
    hops = len(setup.budgets) - 1
    spec = setup.choice.spec.with_microbatches(num_microbatches)
    every = [Choice(spec.as_kind("1f1b"))]
    every += [Choice(spec.as_kind("kfkb", group_size=k)) for k in range(1, num_microbatches + 1)]
    every += [Choice(spec.as_kind("slack", slack=r)) for r in product(range(1, most_slack + 1), repeat=hops)]
    return [choice for choice in every if fits(choice, setup.budgets)]


def constant(occupancy_s: float, latency_s: float = 0.0) -> Link:
    """The same message on every hop, always."""
    return lambda hop, forward, step, m: (occupancy_s, latency_s)
