"""Text generation with groups of sequences in flight against one group at a time, on stages of emulated compute.

Each stage is a thread that sleeps 5 ms for each sequence of a call, as a stage that is bound by its compute. The naive
pipeline sends all sequences as one group, so that one stage works at a time. ``times_naive_sN`` are its seconds over
those of the pipeline, with N stages and the same tokens; ``of_stages_sN`` is that ratio over N, of which 1 would mean
that no stage ever waits. A stage that is bound by reading its weights takes as long for a large group as for a small
one, and gains less.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from jobs.lib.common import Bench, median
from raypipe.engine.decoding import DecodeCall, ThreadDecoding
from raypipe.engine.sampling import Sampling
from raypipe.run.generate_loop import Ending, Prompt, continued, group_size_of

SEQUENCE_S = 0.005
VOCABULARY = 32


@dataclass(frozen=True)
class Settings:
    """Numbers of stages, sequences, new tokens of each, and rounds over all numbers of stages."""

    stages: tuple[int, ...] = (2, 3, 4, 8)
    sequences: int = 8
    tokens: int = 32
    rounds: int = 3


BENCH = Bench(
    "bench_generate",
    __doc__,
    settings=Settings(),
    quick=Settings((2, 3), tokens=8, rounds=1),
    layout={"times naive": r"times_naive_(s\d+)", "of the stages": r"of_stages_(s\d+)"},
    targets={r"of_stages_s\d+": ">= 0.8"},
)


class SleepingStage:
    """Stage of a model whose next token is the newest token plus the number of stages."""

    def __init__(self, *, last: bool) -> None:
        self._last = last

    def run(self, call: DecodeCall, inputs: Any) -> tuple[torch.Tensor, ...]:
        value = (inputs[0] if inputs else call.columns["input_ids"][:, -1]) + 1
        time.sleep(SEQUENCE_S * len(value))
        return (torch.nn.functional.one_hot(value % VOCABULARY, VOCABULARY).float(),) if self._last else (value,)


def generate_s(num_stages: int, group_size: int, settings: Settings) -> float:
    """Measure the seconds in which all sequences are continued.

    Raises:
        RuntimeError: a token is not the one that follows.
    """
    tokens = torch.arange(settings.sequences)[:, None]
    stages: list[Any] = [SleepingStage(last=at == num_stages - 1) for at in range(num_stages)]
    with ThreadDecoding(stages, range(num_stages)) as pipeline:
        begin_s = time.perf_counter()
        prompt, ending = Prompt(tokens, torch.ones_like(tokens)), Ending(settings.tokens)
        new = continued(pipeline, prompt, Sampling(), ending, group_size)
        took_s = time.perf_counter() - begin_s
    if not torch.equal(new, (tokens + num_stages * torch.arange(settings.tokens + 1)) % VOCABULARY):
        raise RuntimeError(f"{num_stages} stages generated other tokens than those that follow")
    return took_s


def main() -> int:
    """Measure both ways in turn, for all numbers of stages."""
    run = BENCH.begin()
    settings = run.settings
    ratios: dict[int, list[float]] = {count: [] for count in settings.stages}
    seconds: dict[int, list[tuple[float, float]]] = {count: [] for count in settings.stages}
    for _, count in run.turns(ratios, settings.rounds):
        naive_s = generate_s(count, settings.sequences, settings)
        took_s = generate_s(count, group_size_of(settings.sequences, count), settings)
        ratios[count].append(naive_s / took_s)
        seconds[count].append((naive_s, took_s))
        run.note(f"{count} stages: {naive_s:.2f} s naive, {took_s:.2f} s in groups")
    rows = []
    for count, of_count in ratios.items():
        run.figures[f"times_naive_s{count}"] = median(of_count)
        run.figures[f"of_stages_s{count}"] = median(of_count) / count
        rate = settings.sequences * settings.tokens
        per_s = [rate / median(one[way] for one in seconds[count]) for way in (0, 1)]
        rows.append([count, *per_s, median(of_count), median(of_count) / count])
    run.raw["seconds"] = seconds
    run.table("generated", ("stages", "naive, tokens/s", "in groups, tokens/s", "times naive", "of the stages"), rows)
    run.end()
    return 0
