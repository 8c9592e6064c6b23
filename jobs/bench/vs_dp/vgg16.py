"""VGG-16 on ImageNet as the planner sees it, from its shapes alone: no torch, no weights, no GPU.

Layers as in Simonyan and Zisserman, ICLR 2015, table 1 D, with images of 224 x 224. Seconds are operations over a rate,
backward twice the forward, and marked as estimates: profiles that others have measured are not ours to ship, and the
rate is what a comparison of then and now depends on.
"""

from __future__ import annotations

from raypipe.ir.graph import ModelGraph, Node

__all__ = ["BATCH", "vgg16"]

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Of the convolutions, in order; 0 halves the image."""
HIDDEN = (4096, 4096, 1000)
SIDE = 224
BATCH = 64
"""Images of a micro-batch, which is what one GPU takes at a time in PipeDream's experiments."""


def vgg16(flops_per_s: float) -> ModelGraph:
    """A node for each layer with its activation; seconds per micro-batch of ``BATCH`` images.

    Args:
        flops_per_s: operations that a device does per second, a product and a sum being two.
    """
    rows: list[tuple[str, int, float, int]] = []  # name, parameters, operations per image, output numbers per image
    side, before = SIDE, 3
    for place, channels in enumerate(CHANNELS):
        if channels == 0:
            side //= 2
            rows.append((f"pool{place}", 0, 0.0, before * side * side))
            continue
        weights = 9 * before * channels
        rows.append((f"conv{place}", weights + channels, 2.0 * weights * side * side, channels * side * side))
        before = channels
    features = before * side * side
    for place, hidden in enumerate(HIDDEN):
        rows.append((f"linear{place}", (features + 1) * hidden, 2.0 * features * hidden, hidden))
        features = hidden
    nodes = []
    for place, (name, parameters, flops, output) in enumerate(rows):
        seconds = BATCH * flops / flops_per_s
        cut = 4 * output if place < len(rows) - 1 else 0
        nodes.append(
            Node(
                name, name, (), 4 * parameters, cut, seconds, seconds, seconds, activation_bytes=4 * output,
                output_bytes=4 * output, source="estimated",
            )
        )  # fmt: skip
    return ModelGraph(tuple(nodes))
