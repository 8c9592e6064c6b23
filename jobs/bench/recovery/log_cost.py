"""What keeping messages for a replay costs a step: a run that keeps what it sends and one that does not, by turns.

    turn        a few steps with replay="auto"      as many with replay="off"      ...
    overhead    the median step of the one turn over that of the other, neighbours compared

Micro-batches are large here, so that messages of a megabyte pass a stage that computes for some tens of milliseconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import ray

from jobs.bench.recovery.nets import MICROBATCHES, WAIT_S, trainer, width_of
from jobs.lib.turns import Held, alternate, blocks, open_gate

__all__ = ["log_cost"]

ROWS = 1024
"""Of a mini-batch."""
WARM_STEPS, TURN_STEPS = 6, 10


def log_cost(size_mb: float, turns: int) -> dict[str, Any]:
    """Ratios of neighbouring turns, and the seconds of all that count.

    Args:
        size_mb: state of each of two stages.
    """
    steps, found = WARM_STEPS + turns * TURN_STEPS, dict[str, list[list[float]]]()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with tempfile.TemporaryDirectory(prefix="log-cost-") as name:
            runs: dict[str, Held] = {}
            for replay in ("auto", "off"):
                gate = Path(name) / f"{replay}.gate"
                open_gate(gate, WARM_STEPS)
                made = trainer(Path(name), replay, size_mb, 2, replay=replay, rows=ROWS, gate=gate, steps=steps)
                runs[replay] = Held(made.start(steps), gate)
                runs[replay].go_to(WARM_STEPS)
            alternate(runs, dict.fromkeys(runs, WARM_STEPS), turns, TURN_STEPS)
            for replay, run in runs.items():
                records = run.handle.wait(timeout_s=WAIT_S).records
                found[replay] = blocks([record.seconds for record in records], WARM_STEPS, turns, TURN_STEPS)
    finally:
        ray.shutdown()
    kept, without = ([median(block) for block in found[replay]] for replay in ("auto", "off"))
    return {
        "ratios": [one / other for one, other in zip(kept, without, strict=True)], "step_s": median(without),
        "message_bytes": ROWS // MICROBATCHES * width_of(size_mb) * 4, "seconds": found,
    }  # fmt: skip
