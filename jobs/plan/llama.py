"""Machines to rent for Llama-7B: plans for 8 hosts of one GPU each, from shapes alone; no weights, no torch, no Ray.

    python jobs/plan/llama.py                       24, 40 and 80 GB at 10 and 25 Gbit/s
    python jobs/plan/llama.py --memory 40 --gbit 25 --table

The graph is analytic: seconds are FLOPs / rate (an estimate, and marked as one), bytes follow from the shapes of
the paper (Touvron et al., arXiv:2302.13971, table 2). Left out: recomputation, and that small kernels are slower.
"""

from __future__ import annotations

import argparse
import json
import time

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.search import Request, decide, plan_of

LAYERS, HIDDEN, INNER, HEADS, VOCABULARY = 32, 4096, 11008, 32, 32000
RATE_FLOPS_S = 60e12
"""Rate that a GPU of this class keeps up in fp32 with tensor cores (TF32), about 40 % of its peak."""
FIXED_S = 2e-3
"""Launches of one micro-batch through the whole model, forward and backward: what makes small ones dear."""


def llama(sequence: int, element_bytes: int) -> ModelGraph:
    """Build the graph of one micro-batch of one sample, with counted operations; a backward takes twice a forward.

    Args:
        sequence: tokens per sample.
        element_bytes: of parameters and activations: 4 for fp32, which this release runs.
    """
    state = sequence * HIDDEN * element_bytes
    attention = 4 * HIDDEN * HIDDEN
    feed_forward = 3 * HIDDEN * INNER
    scores = 2 * 2 * sequence * sequence * HIDDEN  # Q K^T and its product with V
    rows: list[tuple[str, int, float, int]] = [("embed_tokens", VOCABULARY * HIDDEN, 0.0, 0)]
    for i in range(LAYERS):
        # Kept for backward: norm's input, Q, K, V, the attention's output (its scores are made again, as fused
        # attention does); then norm's input, gate, up, their product and the residual.
        rows.append((f"layers.{i}.attention", attention + HIDDEN, 2.0 * sequence * attention + scores, 6 * state))
        wide = 3 * sequence * INNER * element_bytes
        rows.append(
            (f"layers.{i}.feed_forward", feed_forward + HIDDEN, 2.0 * sequence * feed_forward, 2 * state + wide)
        )
    head = VOCABULARY * HIDDEN
    rows.append(("norm", HIDDEN, 0.0, state))
    rows.append(("lm_head", head, 2.0 * sequence * head, sequence * VOCABULARY * element_bytes))
    total = sum(flops for _, _, flops, _ in rows)
    nodes = []
    for name, parameters, flops, kept in rows:
        seconds = flops / RATE_FLOPS_S + FIXED_S / 3 * flops / total
        nodes.append(
            Node(
                name, name, (), parameters * element_bytes, state, seconds, seconds, seconds,
                activation_bytes=kept, output_bytes=state, source="estimated",
            )
        )  # fmt: skip
    return link_nodes(nodes, [(i, i + 1) for i in range(len(nodes) - 1)])


def profiled(sequence: int, element_bytes: int) -> Profile:
    """Build a profile with t(b): a part that grows with the samples, and constant launch times."""
    graph = llama(sequence, element_bytes)
    per_sample_s = graph.busy_s - FIXED_S
    return Profile(graph, 1, tuple((b, FIXED_S + per_sample_s * b) for b in (1, 2, 4, 8)))


def cluster(gpus: int, memory_gb: float, gbit_s: float) -> Cluster:
    """Build a cluster of hosts with one GPU each; GB are 10**9 bytes, of which a tenth is not available."""
    device = ComputeDevice("gpu", 1.0, round(memory_gb * 0.9e9))
    return Cluster.hosts(gpus, 1, inside=Link(), between=Link(gbit_s * 1e9 / 8, 30e-6), device=device)


def planned(memory_gb: float, gbit_s: float, arguments: argparse.Namespace) -> Plan:
    """Plan for the GPUs of the cluster.

    Raises:
        PlanError: the model does not fit; names stage, action and numbers.
    """
    request = Request(
        num_stages=None, num_workers=None, split_points=(), minibatch_size=arguments.minibatch, num_microbatches=None,
        num_samples=10**6, partitioner=arguments.partitioner, reserve_bytes=10**9,
        # fp32 Adam for fp32 weights; bf16 weights carry an fp32 copy and both moments, 12 bytes for 2.
        optimizer_factor=2.0 if arguments.bytes == 4 else 6.0,
    )  # fmt: skip
    model = profiled(arguments.sequence, arguments.bytes)
    return plan_of(decide(request, model, cluster(arguments.gpus, memory_gb, gbit_s)))


def main() -> None:
    """Plan every kind of cluster and print a line, a table or a refusal for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, nargs="+", default=[24.0, 40.0, 80.0], help="GB per GPU")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0, 25.0], help="Gbit/s between hosts")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--bytes", type=int, choices=(2, 4), default=4, help="per element")
    parser.add_argument("--partitioner", default="auto")
    parser.add_argument("--table", action="store_true", help="the whole plan of each")
    arguments = parser.parse_args()
    figures: dict[str, float | None] = {}
    for memory_gb in arguments.memory:
        for gbit_s in arguments.gbit:
            begin_s = time.perf_counter()
            name = f"{memory_gb:g}gb_{gbit_s:g}gbit"
            try:
                plan = planned(memory_gb, gbit_s, arguments)
            except PlanError as error:
                print(f"{memory_gb:g} GB, {gbit_s:g} Gbit/s: DOES NOT FIT. {error}")
                figures[name] = None
                continue
            took_s = time.perf_counter() - begin_s
            found = plan.prediction
            assert found is not None
            fullest = max(stage.memory_bytes for stage in found.stages)
            loss = "" if found.one_f_one_b_s is None else f", 1f1b {found.one_f_one_b_s / found.step_s - 1:+.1%}"
            print(
                f"{memory_gb:g} GB, {gbit_s:g} Gbit/s: {plan.partition.num_stages} stages, {plan.schedule.kind}{loss}, "
                f"{plan.num_microbatches} x {plan.microbatch_size} ({found.decided_by}), step {found.step_s:.2f} s, "
                f"idle {found.bubble_fraction:.0%}, fullest {fullest / 1e9:.1f} GB; bound: {found.bound}; "
                f"planned in {took_s:.2f} s"
            )
            figures[name] = round(found.step_s, 4)
            if arguments.table:
                print(plan)
    print(json.dumps({"bench": "plan_llama", "figures": figures}))


if __name__ == "__main__":
    main()
