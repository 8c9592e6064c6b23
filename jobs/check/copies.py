"""What copies of state cost: taking, restoring and reading them, and steps beside which one is taken and sent.

Before that, what a thread that sends needs to keep a message, for a worker that is lost and does steps again alone.

    python jobs/check/copies.py --mib 96 --every 10         two stages on Ray actors, 96 MiB of state each

Steps with and without a copy take turns in one run: ``every`` steps of which the first has a copy taken before it, then
as many without one. Ratios are of the means of neighbouring turns: of seconds, which a busy machine spoils, and of the
stages' processor seconds, which it hardly does. A copy is sent to the other worker, on this host.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch import nn

import raypipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.machine import machine_line
from raypipe.engine.checkpoint import load_stage, take_snapshot
from raypipe.engine.copy import StageCopies, bring_back
from raypipe.engine.message_log import MessageLog
from raypipe.engine.messages.frame import encode
from raypipe.engine.state import StageState
from raypipe.ir.schedule import Action, Op
from raypipe.ir.segment import Segment
from raypipe.ir.work_order import Order
from raypipe.planner.rows import rows_for
from raypipe.planner.segments import train_segments
from raypipe.runtime.driver.client import connected
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.workers.allocator import keep_freed_memory
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.packing import stored
from raypipe.runtime.workers.remote_copy import RemoteCopy, Tally

WIDTH, SAMPLES, MICROBATCHES = 1024, 64, 4
LAYER_BYTES = 12 * WIDTH * WIDTH  # AdamW keeps two tensors beside each parameter


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4, fused=True)


def trainer_of(layers: int, steps: int) -> raypipe.PipelineTrainer:
    """Two stages of so many layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(block for _ in range(2 * layers) for block in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()))
    )
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH))
    return raypipe.PipelineTrainer(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=adamw,
        train_data=data,
        pipeline=raypipe.PipelineConfig(
            num_stages=2, minibatch_size=SAMPLES, num_microbatches=MICROBATCHES, partitioner=(str(2 * layers),)
        ),
    )


def took_ms(call: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    call()
    return (time.perf_counter() - begin_s) * 1e3


def processor_s(process: int) -> float:
    """Of all threads of a process, since it began."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_one_process(assembled: Any, tensors: Any, rounds: int) -> None:
    """A stage of this process, in one thread."""
    torch.set_num_threads(1)
    run, program = assembled.run, assembled.setup.programs[0]
    state = StageState(program, {name: tensors[name].clone() for name in program.parameters}, adamw, None)
    for parameter in state.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    assert state.optimizer is not None
    state.optimizer.step()
    copies = StageCopies(program, state)
    first, second = took_ms(lambda: copies.take(0, 1)), took_ms(lambda: copies.take(1, 1))
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        measured = {
            "snapshot for a checkpoint": lambda: take_snapshot(program, state, run.persistent),
            "take": lambda: copies.take(1, 1),
            "go back": lambda: bring_back(copies.source(1), program, state, adamw, None),
        }
        for name, call in measured.items():
            found.setdefault(name, []).append(took_ms(call))
        begin_s = time.perf_counter()
        finish = copies.begin(1, 1)
        found.setdefault("begin, which a step waits for", []).append((time.perf_counter() - begin_s) * 1e3)
        finish()
    size = copies.size_bytes / 2 / 2**20
    print(
        f"one process, {size:.0f} MiB in {3 * len(state.parameters)} matrices: first two {first:.0f}, {second:.0f} ms"
    )
    for name, ms in found.items():
        print(f"  {name:28} p50 {median(ms):8.1f} ms, least {min(ms):8.1f}")


def messages_kept(rounds: int) -> None:
    """In the log of what is sent, whose oldest steps go meanwhile; memory is kept as workers keep it."""
    keep_freed_memory()
    for kib in (64, 1024, 16384):
        log = MessageLog()
        log.copied(0, 64 << 20)
        keep, tensor, used_ms = log.writer(1), torch.randn(kib * 256), []
        for step in range(rounds):
            log.begin(Order(Segment(step, step, 0, step, (1,))))
            action = Action(0, Op.SEND_F, step)
            message = encode(action, [tensor], generation=0, max_tensors=1)
            begin_s = time.thread_time()
            keep(action, message)
            used_ms.append((time.thread_time() - begin_s) * 1e3)
        print(f"a message of {kib} KiB kept: p50 {median(used_ms):.3f} ms of processor time, least {min(used_ms):.3f}")


def on_workers(assembled: Any, tensors: Any, every: int, turns: int, share: float) -> None:
    """Steps of a pipeline, with a copy and without one in turns."""
    fleet = Fleet(2, {"CPU": share})
    try:
        fleet.configure(assembled.run, assembled.setup, [stored(tensors)])
        schedule = cache(lambda key: rows_for(assembled.plan.plan, key))
        steps = 2 * every * (turns + 1)
        segments = train_segments(SAMPLES, SAMPLES, SAMPLES // MICROBATCHES, steps)
        orders = (
            Order(segment, keep_copy=after.step % (2 * every) == 0 and after.step < steps)
            for segment, after in segments
        )
        ends_s, copies, used_s = [], [], []
        for reports in fleet.run(orders, schedule):
            ends_s.append(max(of_stage[0].end_s for of_stage in reports))
            used_s.append(sum(processor_s(member["process"]) for member in fleet.members))
            copies.append([of_stage[0].copied for of_stage in reports])
        seconds = [after - before for before, after in itertools.pairwise(ends_s)]
        with_copy, without, arrived, work = [], [], [], []
        for first in range(2 * every, steps, 2 * every):  # the step behind which the copy runs
            with_copy.append(mean(seconds[first - 1 : first - 1 + every]))
            without.append(mean(seconds[first - 1 + every : first - 1 + 2 * every]))
            before, between, behind = (used_s[min(first - 1 + n * every, steps - 1)] for n in range(3))
            work.append((between - before) / (behind - between) if behind > between else 1.0)
            held = (at for at in range(first, steps) if all(c and c.step >= first for c in copies[at]))
            arrived.append(next(held, steps) - first + 1)
        low, middle, high = quantiles([a / b for a, b in zip(with_copy, without, strict=True)], n=4)
        with_ms, without_ms = median(with_copy) * 1e3, median(without) * 1e3
        print(f"on workers, {every} steps in turns: {without_ms:.0f} ms a step without, {with_ms:.0f} with a copy")
        print(f"  ratio p50 {middle:.3f}, quartiles {low:.3f} {high:.3f} of {len(with_copy)} turns")
        low, middle, high = quantiles(work, n=4)
        print(f"  processor seconds of the stages: ratio p50 {middle:.3f}, quartiles {low:.3f} {high:.3f}")
        last = [copy for copy in copies[-1] if copy]
        print(
            f"  copied in {[round(c.copied_s * 1e3) for c in last]} ms, sent in {[round(c.sent_s, 2) for c in last]} s"
        )
        print(f"  reported to be held after {arrived} steps")
        reads = [(actor, facts) for actor, facts in fleet.copies() if facts.held and facts.stage == 0]
        (actor, facts), program = reads[0], assembled.setup.programs[0]
        source = RemoteCopy(actor, "", facts.generation, 0, facts.steps[-1], facts.names)
        fresh = StageState(program, {name: tensors[name].clone() for name in program.parameters}, adamw, None)
        read_ms = took_ms(lambda: load_stage(source.opened(Tally()), program, fresh))
        print(f"  read and restored elsewhere: {read_ms:.0f} ms")
    finally:
        fleet.stop()


def main() -> int:
    """One process, then two workers."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--mib", type=int, default=96, help="of state on each stage")
    asked.add_argument("--every", type=int, default=10, help="steps of a turn")
    asked.add_argument("--turns", type=int, default=8)
    found = asked.parse_args()
    layers = max(1, round(found.mib * 2**20 / LAYER_BYTES))
    steps = 2 * found.every * (found.turns + 1)
    needs = {"CPU": 0.5}
    print(machine_line())
    with connected(2, needs):
        trainer = trainer_of(layers, steps)
        job = trainer._prepared()
        assembled = assemble(trainer._blueprint(job, steps, local=False), job.planned)
        messages_kept(60)
        in_one_process(assembled, job.tensors, 5)
        on_workers(assembled, job.tensors, found.every, found.turns, 0.5)
    print(machine_line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
