"""How much of their gradients replicas exchange at a time, and the memory that it takes: one rule for plan and run."""

from __future__ import annotations

__all__ = ["CHUNK_BYTES", "CLOSED_AT", "chunk_bytes", "exchange_bytes"]

CHUNK_BYTES = 8 << 20
"""Of all lanes of a replica together. Each chunk takes two messages' latency, and several of them lie in memory."""
CLOSED_AT = 1 / 8
"""Of a chunk: filled so far, it ends with the use site in it, so that it need not wait for an earlier layer."""


def chunk_bytes(lanes: int, replicas: int) -> int:
    """Of a chunk of the gradients, in one lane; the same on every replica of a stage."""
    return max(64, CHUNK_BYTES // -(-lanes // replicas) // 64 * 64)


def exchange_bytes(gradient_bytes: int, lanes: int, replicas: int) -> int:
    """The most that a replica holds for an exchange, besides its sums of gradients.

    Of every lane of its own a copy of the chunk, what others sent of it, and the buffers that these travel in; of the
    totals what it summed, what it heard, and both joined.

    Args:
        gradient_bytes: of the stage, in one lane.
    """
    if replicas < 2:
        return 0
    own = -(-lanes // replicas)
    return (3 * own + 2) * min(gradient_bytes, chunk_bytes(lanes, replicas))
