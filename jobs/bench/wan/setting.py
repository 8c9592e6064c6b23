"""Setting of Protocol NanoGPT, its two published records in our simulator, and what our planner chooses for it.

The model, the link and the records are facts from https://github.com/PluralisResearch/ProtocolNanoGPT (README.md,
train_gpt.py and the READMEs of records/, commit 0551bc3): a GPT of eight layers of width 1024, one per stage, 512
sequences of 1,024 tokens per step, and a meter that lets every rank receive over one wire of 200 Mbit/s, on which each
message takes its bits / rate + 50 ms.

Assumed here: an H100 does 0.4 of 989 TFLOP/s, a backward takes twice a forward, and codecs pass 1 TB/s, a third of what
ours do on an H200 (docs/results/codec.md); tah4 and tah3 were not measured there. The optimizer's step is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from raypipe.engine.codec.codec import BLOCK, CODECS, wire_bytes
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.planner.search import Decision, Request, decide

__all__ = ["LOSSY", "MILD", "RECORDS", "STEPS", "WAN", "WIDTH", "Record", "chosen", "codec_of", "reproduced"]

STAGES, WIDTH, TOKENS, VOCABULARY, SEQUENCES = 8, 1024, 1024, 50_304, 512
WAN = Link(200e6 / 8, 0.050, "half", latency_occupies_wire=True)
STEPS = 2925
"""Steps after which the dense record reached the target loss."""
FLOP_S, CODED_BYTES_S = 0.4 * 989e12, 1e12
LOSSY = tuple(name for name in CODECS if name != "none")
MILD = ("bf16", "int8")
"""Codecs that ``codec_forward="auto"`` permits; gradients get the first one only."""


class Record(NamedTuple):
    """Published record.

    Attributes:
        wire_bytes: bytes of a token that cross a boundary in each direction.
        sequences: sequences in a micro-batch.
        hidden: width of the inner layer of a block's MLP.
        step_s, steps: published seconds of a step, and number of steps.
    """

    wire_bytes: int
    sequences: int
    hidden: int
    step_s: float
    steps: int


RECORDS = {
    "dense_bf16": Record(2 * WIDTH, 8, 4 * WIDTH, 100.475, STEPS),
    "reparamssn_160": Record(2 * 160 + 2, 16, 11_292, 19.889, 9125),
}


def reproduced(record: Record) -> Decision:
    """Simulate a record's step: 1F1B with its micro-batches, one layer per stage, without a choice of the planner."""
    profile = _profile(record.hidden, record.wire_bytes)
    return decide(_request("1f1b", num_microbatches=SEQUENCES // record.sequences), profile, _cluster())


def chosen(forward: Sequence[str], backward: Sequence[str], schedule: str = "auto") -> Decision:
    """Plan the dense model's step: codecs among those permitted, micro-batches and schedule.

    Args:
        forward, backward: names of the codecs that activations and gradients may have; none of them may be used too.
    """
    permitted = tuple(map(codec_of, forward)), tuple(map(codec_of, backward))
    request = dataclasses.replace(_request(schedule), codec_choices=permitted)
    return decide(request, _profile(4 * WIDTH, 4 * WIDTH), _cluster())


def codec_of(name: str) -> CodecCost:
    """Return the cost of a codec: bytes as in its table, and the assumed seconds."""
    elements = 64 * BLOCK
    if name == "none":
        return NO_CODEC
    ratio = 4 * elements / wire_bytes(name, torch.float32, elements)
    return CodecCost(name, ratio, 1 / CODED_BYTES_S, 1 / CODED_BYTES_S)


def _request(schedule: str, num_microbatches: int | None = None) -> Request:
    points = tuple(f"blocks.{i}" for i in range(1, STAGES))
    return Request(
        None, STAGES, points, SEQUENCES, num_microbatches, num_samples=STEPS * SEQUENCES, schedule=schedule
    )  # fmt: skip


def _cluster() -> Cluster:
    return Cluster(tuple(ComputeDevice(f"rank{i}", host=f"home{i}") for i in range(STAGES)), (WAN,))


def _profile(hidden: int, boundary_bytes: int) -> Profile:
    """Estimate the seconds of the model's parts from their multiply-adds, for sequences as samples.

    Args:
        hidden: width of the inner layer of a block's MLP.
        boundary_bytes: bytes of a boundary tensor of one token, before a codec.
    """
    attention_flop = 2 * TOKENS * TOKENS * WIDTH  # causal: half of all scores
    block_s = (2 * TOKENS * WIDTH * (4 * WIDTH + 2 * hidden) + attention_flop) / FLOP_S
    head_s = 2 * TOKENS * WIDTH * VOCABULARY / FLOP_S
    nodes = [_node(f"blocks.{i}", block_s, TOKENS * boundary_bytes) for i in range(STAGES)]
    graph = ModelGraph((*nodes[:-1], dataclasses.replace(nodes[-1], cut_bytes=None), _node("head", head_s, 0)))
    return Profile(graph, 1, tuple((count, count * graph.busy_s) for count in (1, 2, 4, 8)))


def _node(name: str, seconds: float, boundary_bytes: int) -> Node:
    return Node(
        name, name, (), 1, boundary_bytes, forward_s=seconds, backward_input_s=seconds, backward_weight_s=seconds,
        output_bytes=boundary_bytes, source="estimated",
    )  # fmt: skip
