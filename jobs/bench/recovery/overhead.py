"""Cost of copies for a run whose stages have a gigabyte of state each, over a wire that has a rate.

    settling    copies as a run takes them, until one has reported its cost; the first ones use new memory
    turn        copy, steps in parallel with it, steps until the next one      as many steps without a copy      ...
    overhead    seconds of turns with a copy over turns without, neighbours compared

The wire is a veth pair between two network namespaces with a token bucket filter, one raylet in each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository's root

from jobs.bench.recovery.nets import BATCH, MICROBATCHES, SAMPLES, trainer
from jobs.lib.shaped import rig
from raypipe.ir.segment import Order
from raypipe.planner.segments import rows_for, train_segments
from raypipe.run.ordering import NEW_MEMORY_COPIES, CopyTimes
from raypipe.run.plans.blueprint import assemble
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.worker.packing import stored

__all__ = ["overhead"]

LIMIT_S = 2400.0
STORE_BYTES = 1 << 30
BEFORE_STEPS = 9
"""Steps without a copy: the first is not counted, the others give the seconds of a step."""
SETTLING_COPIES = 1 + NEW_MEMORY_COPIES
MOST_STEPS = 100_000


def overhead(rate_mbit: float, options: dict[str, Any]) -> dict[str, Any]:
    """Measure in a network of our own.

    Args:
        options: megabytes of state per stage, and turns.

    Raises:
        RuntimeError: no network can be made here, or the run failed.
    """
    with rig(store_bytes=STORE_BYTES) as lab:
        lab.rate(rate_mbit)
        process = lab.start(0, "bench/recovery/overhead.py", json.dumps(options))
        found: dict[str, Any] = lab.answer(process, LIMIT_S, lambda line: print(" ", line, end="", flush=True))
        return found


def in_the_lab(megabytes: int, turns: int) -> dict[str, Any]:
    """Train two stages, a worker in each namespace, with the interval that a run would choose after the first copy."""
    head = os.environ["RAY_HEAD"]
    ray.init(address=head, _node_ip_address=head.partition(":")[0], log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        made = trainer(Path(folder), "overhead", megabytes, 2)
        job = made._prepared()
        blueprint = made._blueprint(job, 1, local=False)
        assembled = assemble(blueprint, job.planned)
        fleet = Fleet(2, Terms({"CPU": 1}))
        try:
            fleet.configure(blueprint.setup, assembled.setup, [stored(job.tensors)])
            return Turns(fleet, cache(lambda key: rows_for(assembled.plan, key)), turns).run()
        finally:
            fleet.stop()
            ray.shutdown()


class Turns:
    """Steps with a copy and without one in turns, as many of each as there are between two copies of a run."""

    def __init__(self, fleet: Fleet, schedules: Any, turns: int) -> None:
        self._fleet, self._schedules, self._turns = fleet, schedules, turns
        self._times = CopyTimes(1)
        self._begin = self._length = 0  # steps: first turn's begin, length of each; 0 until copies have settled
        self._copies = 0

    def run(self) -> dict[str, Any]:
        """Run the steps; return all seconds, and the ratios of turns with a copy over turns without."""
        seconds: list[float] = []
        end_s, sent = None, 0.0
        for reports in self._fleet.run(self._orders(), self._schedules):
            of_step = [of_stage[0] for of_stage in reports]
            before_s, end_s = end_s, max(report.end_s for report in of_step)
            if before_s is None:
                continue
            seconds.append(end_s - before_s)
            self._times.on_step(seconds[-1], of_step)
            sent = max([sent, *(report.copied.sent_s for report in of_step if report.copied)])
            if len(seconds) % 20 == 0:
                print(f"step {len(seconds)}: {median(seconds[-20:]):.3f} s", flush=True)
        # Seconds begin with those of step 1.
        at = [self._begin - 1 + turn * self._length for turn in range(2 * self._turns)]
        means = [mean(seconds[begin : begin + self._length]) for begin in at]
        ratios = [with_copy / without for with_copy, without in zip(means[::2], means[1::2], strict=True)]
        return {"ratios": ratios, "interval_steps": self._length, "sent_s": sent, "step_s": median(means[1::2]),
                "seconds": seconds}  # fmt: skip

    def _orders(self) -> Iterator[Order]:
        for segment, after in train_segments(SAMPLES, BATCH, BATCH // MICROBATCHES, MOST_STEPS):
            step = after.step
            if self._length:
                since = step - self._begin
                if since >= 2 * self._turns * self._length:
                    return
                copies = since % (2 * self._length) == 0
            else:
                copies = step >= BEFORE_STEPS and self._times.due(step)
                if copies and self._copies == SETTLING_COPIES:
                    self._begin, self._length = step, self._times.interval
                    print(f"{self._length} steps a turn", flush=True)
            if copies:
                self._copies += 1
                self._times.ordered(step)
            yield Order(segment, keep_copy=copies)


if __name__ == "__main__":
    print(json.dumps(in_the_lab(**json.loads(sys.argv[1]))), flush=True)
