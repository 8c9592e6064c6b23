"""Codecs in plans: smaller messages, and the seconds that encoding and decoding take."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import asdict
from typing import Any

import pytest

from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.ir.from_plain import from_plain
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.plan import HopPrediction, Plan, Prediction
from raypipe.ir.profile import Profile
from raypipe.planner.search import Decision, Request, decide, plan_of

NODES = tuple(
    Node(f"op{i}", f"layers.{i}", (), 1 << 10, 1 << 20, forward_s=0.001, backward_weight_s=0.002, source="measured")
    for i in range(4)
)
PROFILE = Profile(ModelGraph(NODES), 1, ((1, 0.012),))
REQUEST = Request(2, 2, (), 8, 8, num_samples=100, schedule="1f1b")
SLOW = Cluster(
    (ComputeDevice("a"), ComputeDevice("b")), (Link(bandwidth_bytes_s=1e8),)
)  # 10.5 ms for a message of 1 MiB
INT8 = CodecCost("int8", 4.0, 1e-9, 5e-10)
BF16 = CodecCost("bf16", 2.0, 0.0, 0.0)


def plan(request: Request, cluster: Cluster | None = SLOW) -> Plan:
    return plan_of(decide(request, PROFILE, cluster), 0)


def predicted(*codecs: CodecCost, cluster: Cluster | None = SLOW) -> Prediction:
    found = plan(dataclasses.replace(REQUEST, codecs=codecs), cluster).prediction
    assert found is not None
    return found


def test_a_message_takes_what_its_codec_makes_of_it() -> None:
    (hop,) = predicted(INT8, BF16).hops
    encode_s, wire_s, decode_s = (1 << 20) * 1e-9, (1 << 20) / 4e8, (1 << 20) * 5e-10
    assert hop.message_bytes == 1 << 20
    assert hop.occupancy_s == pytest.approx(wire_s)  # the longest of the three
    assert hop.latency_s == pytest.approx(encode_s + decode_s)
    assert hop.back_s == pytest.approx((0.0, (1 << 20) / 2e8))
    assert hop.busiest_s == hop.back_s


def test_on_a_slow_link_codecs_make_a_step_shorter_and_on_a_free_one_longer() -> None:
    whole, forward, both = predicted(NO_CODEC, NO_CODEC), predicted(INT8, NO_CODEC), predicted(INT8, INT8)
    assert both.step_s < forward.step_s < whole.step_s
    assert whole.hops[0].back_s is None
    free = predicted(NO_CODEC, NO_CODEC, cluster=None)
    assert predicted(INT8, INT8, cluster=None).step_s > free.step_s


def test_a_plan_says_what_its_codecs_cost() -> None:
    found = plan(dataclasses.replace(REQUEST, codecs=(INT8, NO_CODEC)))
    assert dict(found.reasons)["codecs"] == (
        "activations in int8, 4.0 times smaller than fp32, 1.00 and 0.50 s per GB to encode and decode"
    )
    assert "codecs" not in dict(plan(REQUEST).reasons)


UNEVEN = tuple(
    Node(f"op{i}", f"layers.{i}", (), 1 << 26, cut_bytes, 0.001, backward_weight_s=0.002, source="measured")
    for i, cut_bytes in enumerate((1 << 10, 1 << 21, 1 << 21, 1 << 10, 1 << 21, 0))
)
"""Equal stages need the large cut in the middle; a small one is an operation beside it."""


@pytest.mark.parametrize("partitioner", ["auto", "prefix_sum", "antichain"])
def test_a_cut_goes_where_messages_are_large_once_a_codec_makes_them_small(partitioner: str) -> None:
    profile = Profile(ModelGraph(UNEVEN), 1, ((1, 0.018),))

    def cut(*codecs: CodecCost, link: Link = SLOW.links[0]) -> tuple[int, ...]:
        request = dataclasses.replace(REQUEST, partitioner=partitioner, codecs=codecs)
        return decide(request, profile, Cluster((ComputeDevice("a"), ComputeDevice("b")), (link,))).partition.cuts

    assert cut(NO_CODEC, NO_CODEC) == (4,), "42 ms for 2 MiB there and back"
    assert cut(BF16, BF16) == (4,), "21 ms are still more than the 12 ms of the larger stage there"
    small = CodecCost("int4", 16.0)
    assert cut(small, small) == (3,)
    assert cut(small, NO_CODEC) == (4,), "gradients travel whole"
    slow = CodecCost("int4", 16.0, encode_s_per_byte=1e-8)
    assert cut(slow, slow) == (4,), "encoding takes as long as the link would"
    free = Link()
    assert cut(NO_CODEC, NO_CODEC, link=free) == (3,)
    assert cut(slow, slow, link=free) == (4,), "on any link"


def test_a_prediction_with_two_ways_is_read_back() -> None:
    found = predicted(INT8, BF16)
    assert from_plain(Prediction, json.loads(json.dumps(asdict(found)))) == found
    assert HopPrediction(8, 0.5, 0.25).ways_s == ((0.5, 0.25), (0.5, 0.25))


def test_stages_with_replicas_are_compared_with_what_codecs_make_of_messages() -> None:
    """The table of shapes has the predicted steps, so that a codec decides what data parallelism is worth."""
    three = Cluster((ComputeDevice("a"), ComputeDevice("b"), ComputeDevice("c")), (Link(bandwidth_bytes_s=1e8),))
    steps_s = []
    for codecs in ((NO_CODEC, NO_CODEC), (INT8, BF16), (INT8, INT8)):
        asked = dataclasses.replace(REQUEST, num_workers=None, schedule="auto", codecs=codecs)
        rows = plan(dataclasses.replace(asked, replicas=None), three).candidates
        row = next(row for row in rows if max(row.workers) == 2 and not row.refused)
        for workers in (row.workers, (1, 2)):
            prediction = plan(dataclasses.replace(asked, replicas=workers), three).prediction
            assert prediction is not None
            if workers == row.workers:
                assert row.step_s == pytest.approx(prediction.step_s)
        steps_s.append(prediction.step_s)
    assert steps_s == sorted(steps_s, reverse=True)
    assert len(set(steps_s)) == 3


NONE = (NO_CODEC, NO_CODEC)
FP4 = CodecCost("int4", 7.5, 4e-10, 4e-10)
PERMITTED = ((BF16, INT8, FP4), (BF16, INT8))


def chosen(bandwidth_bytes_s: float, **fields: Any) -> Decision:
    fields = {"codec_choices": PERMITTED, "schedule": "auto"} | fields
    request = dataclasses.replace(REQUEST, **fields)
    return decide(request, PROFILE, dataclasses.replace(SLOW, links=(Link(bandwidth_bytes_s, 1e-3),)))


def sent_share(decision: Decision) -> float:
    return sum(1 / codec.ratio for codec in decision.request.codecs)


def test_a_codec_is_chosen_only_with_permission_and_on_links_that_are_known() -> None:
    assert chosen(1e6, codec_choices=((), ())).request.codecs == NONE
    assert chosen(1e6).request.codecs == (FP4, INT8)
    assert chosen(1e6, codec_choices=((BF16,), ())).request.codecs == (BF16, NO_CODEC)
    request = dataclasses.replace(REQUEST, codec_choices=PERMITTED, schedule="auto")
    assert decide(request, PROFILE).request.codecs == NONE


def test_a_codec_that_is_set_stays() -> None:
    assert chosen(1e6, codecs=(BF16, NO_CODEC), codec_choices=((), (INT8,))).request.codecs == (BF16, INT8)


def test_the_choice_is_no_worse_than_any_pair_and_says_why() -> None:
    for bandwidth_bytes_s in (1e6, 1e7, 1e8, 1e9, 1e10):
        best = chosen(bandwidth_bytes_s)
        pairs = itertools.product((NO_CODEC, *PERMITTED[0]), (NO_CODEC, *PERMITTED[1]))
        steps_s = {pair: chosen(bandwidth_bytes_s, codecs=pair, codec_choices=((), ())) for pair in pairs}
        least_s = min(each.prediction.step_s for each in steps_s.values())
        gain = 1.0 if best.request.codecs != NONE else 1 + best.request.min_gain
        assert best.prediction.step_s <= least_s * 1.005 * gain
        why = dict(best.reasons)["choice of codecs"]
        assert "predicted steps by codec of activations/gradients: " in why
        assert ("no permitted codec makes the step shorter" in why) == (best.request.codecs == NONE)


def test_slower_links_never_get_a_milder_codec() -> None:
    shares = [sent_share(chosen(10**power)) for power in (6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10, 11)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 2.0


def test_a_small_gain_is_not_worth_a_codec() -> None:
    assert chosen(10**8.5, min_gain=0.0).request.codecs != NONE
    assert chosen(10**8.5, min_gain=10.0).request.codecs == NONE


def test_the_group_size_of_kfkb_is_chosen_where_it_is_open() -> None:
    late = dataclasses.replace(SLOW, links=(Link(1e9, 0.005),))
    asked = dataclasses.replace(REQUEST, schedule="kfkb")
    best = decide(asked, PROFILE, late)
    each = [decide(dataclasses.replace(asked, group_size=k), PROFILE, late).prediction.step_s for k in range(1, 9)]
    assert best.prediction.step_s <= min(each) * 1.005 < each[0]
    assert f"k={best.request.group_size} has the shortest step" in dict(best.reasons)["schedule"]
    assert decide(asked, PROFILE).request.group_size is None
