"""Training through the meter: stages that compute nothing, whose messages arrive when a slow wire has carried them.

A worker receives over one wire, in the order in which its schedule takes messages. As in the meter of Protocol NanoGPT,
the receiver computes when a message arrives from the time at which it was sent, and waits until then:

    begins = max(sent, time at which the message before has arrived)        arrives = begins + bytes / rate + latency

Bytes are those of the encoded message. Workers are threads of one process (``fit(local=True)``), which run the rows,
codecs and messages that actors would. Delays of a network are not there: netem is not in every kernel, and a rate alone
would leave out what the latency does to the wire.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

import raypipe
from jobs.lib.common import median
from jobs.lib.emulated import Block, Hold, check_trained, trainer_of
from raypipe.engine.messages.channel import InMemoryChannel, Message
from raypipe.ir.schedule import Action, Op

__all__ = ["Metered", "Wire", "run_metered"]


class Wire(NamedTuple):
    """Wire over which each worker receives: bytes per second, and seconds of every message besides."""

    bytes_s: float
    latency_s: float


class Metered(NamedTuple):
    """Measured run.

    Attributes:
        step_s: seconds of every step.
        work_s: median seconds of every stage by operation (F, B, I, W) in the traced step; 0 where it did not occur.
    """

    step_s: list[float]
    work_s: dict[str, list[float]]


def run_metered(
    stages: int, width: int, num_microbatches: int, num_steps: int, wire: Wire, **pipeline: Any
) -> Metered:  # fmt: skip
    """Train stages that send boundary tensors of ``width`` numbers.

    Args:
        pipeline: further fields of PipelineConfig, such as the schedule and the codecs.

    Raises:
        RuntimeError: a stage has not done every micro-batch of every step.
    """
    blocks = [Block(0.0, 0.0, last=stage == stages - 1, width=width) for stage in range(stages)]
    optimizer = Hold(_no_delay, num_microbatches)
    with tempfile.TemporaryDirectory(prefix="wan-") as folder, _metered(wire):
        trainer = trainer_of(blocks, num_microbatches, num_steps, optimizer, folder, **pipeline)
        result = trainer.fit(num_steps=num_steps, local=True, progress=False)
        path = Path(folder) / Path(folder).name
        spans = pq.read_table(path / "timeline" / "spans.parquet").to_pylist()
        check_trained(raypipe.load_state_dict(path), stages, num_microbatches * num_steps)
    work_s = {op: [_took_s(spans, f"{stage}{op}") for stage in range(stages)] for op in "FBIW"}
    return Metered([record.seconds for record in result.records], work_s)


def _no_delay(hop: int, forward: bool, step: int, microbatch: int) -> float:
    return 0.0


def _took_s(spans: list[dict[str, Any]], name: str) -> float:
    took = [
        span["end_s"] - span["start_s"]
        for span in spans
        if span["source"] == "measured" and span["action"].rstrip("0123456789") == name
    ]
    return median(took) if took else 0.0


@contextlib.contextmanager
def _metered(wire: Wire) -> Iterator[None]:
    """Give every thread that receives a wire of its own."""
    plain, own = InMemoryChannel.recv, threading.local()

    def recv(self: InMemoryChannel, action: Action, timeout_s: float) -> Message:
        message = plain(self, action, timeout_s)
        if action.op in (Op.SEND_F, Op.SEND_B):
            begins_s = max(getattr(own, "arrives_s", 0.0), message.stamp.sent_at_s)
            own.arrives_s = begins_s + message.stamp.wire_bytes / wire.bytes_s + wire.latency_s
            time.sleep(max(0.0, own.arrives_s - time.time()))
        return message

    InMemoryChannel.recv = recv  # type: ignore[method-assign]
    try:
        yield
    finally:
        InMemoryChannel.recv = plain  # type: ignore[method-assign]
