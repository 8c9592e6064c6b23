"""Combinations of features, drawn at random: each trains what plain PyTorch trains, or is refused by a field's name.

    python jobs/check/combinations.py --trials 300 --seed 1      a hunt; every trial is a seed of its own, "1-17"
    python jobs/check/combinations.py --one 1-17                 one of them again, smaller and smaller while it fails
    python jobs/check/combinations.py --given '{"net": "gpt", ...}'

The exit status is 1 where one trained something else or ended otherwise. The last line is JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # before torch is loaded: plain PyTorch must be equal to itself

import torch

from jobs.lib.combinations.drawn import Combination, drawn
from jobs.lib.combinations.trial import Outcome, carry_out
from jobs.lib.machine import machine_line

LONGEST_S = 300.0
"""For one trial; then the process ends with the stacks of all threads."""


def outcome_of(found: Combination) -> Outcome:
    """In a folder of its own."""
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    try:
        with tempfile.TemporaryDirectory(prefix="combination-") as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return carry_out(found, Path(name))
    finally:
        faulthandler.cancel_dump_traceback_later()


def smaller(found: Combination) -> Iterator[Combination]:
    """The same with one thing less."""
    usual = Combination()
    if found.stop:
        yield replace(found, stop=0, first={}, first_workers=None)
    for name in ("optimizer", "scheduler", "data", "evaluates", "made_by_workers", "max_failures"):
        if getattr(found, name) != getattr(usual, name):
            yield replace(found, **{name: getattr(usual, name)})
    for steps in range(1 + found.stop, found.steps):
        yield replace(found, steps=steps)
    for name in found.fields.keys() - {"minibatch_size", "num_microbatches", "num_stages", "partitioner", "schedule"}:
        less: Any = {k: v for k, v in found.fields.items() if k != name}
        yield replace(found, fields=less, first={k: v for k, v in found.first.items() if k != name})
    minibatch = found.fields["minibatch_size"]
    if found.samples > minibatch:
        yield replace(found, samples=minibatch)
    for name, value in (("schedule", "1f1b"), ("num_stages", 2), ("num_stages", 1), ("partitioner", "parameters")):
        if found.fields.get(name) != value and not found.stop:
            yield found.with_fields(**{name: value})
    count = found.fields["num_microbatches"]
    if count > 1 and not found.stop:
        size = -(-minibatch // count)
        yield replace(
            found.with_fields(num_microbatches=count - 1, minibatch_size=size * (count - 1)), samples=minibatch
        )
    if found.net != "perceptron":
        yield replace(found, net="perceptron")


def shrunk(found: Combination, word: str) -> Combination:
    """The smallest that still ends so."""
    while True:
        for less in smaller(found):
            if outcome_of(less).word == word:
                found = less
                print(f"  still {word}: {less}", flush=True)
                break
        else:
            return found


def shape_of(refusal: str) -> str:
    """Without its numbers and names, so that equal ones are counted once."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?|\(.*?\)", "*", refusal)[:120]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin", type=int, default=0, help="number of the first trial")
    parser.add_argument("--one", metavar="SEED-TRIAL")
    parser.add_argument("--given", metavar="JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(machine_line(), flush=True)
    if asked.one or asked.given:
        found = Combination.parse(asked.given) if asked.given else drawn(Random(f"combination {asked.one}"))
        outcome = outcome_of(found)
        print(found, outcome.word, *outcome.details, sep="\n", flush=True)
        if not outcome.good:
            found = shrunk(found, outcome.word)
            print("smallest:", found, *outcome_of(found).details, sep="\n")
        return 0 if outcome.good else 1
    counts, bad, refusals = Counter[str](), [], Counter[str]()
    for trial in range(asked.begin, asked.begin + asked.trials):
        name = f"{asked.seed}-{trial}"
        found = drawn(Random(f"combination {name}"))
        outcome = outcome_of(found)
        counts[outcome.word] += 1
        if outcome.word == "refused":
            if not refusals[shape_of(outcome.details[0])]:
                print(f"{name} refused: {outcome.details[0]}", flush=True)
            refusals[shape_of(outcome.details[0])] += 1
        if not outcome.good:
            bad.append(name)
            print(f"{name} {outcome.word}: {found}", *outcome.details[-6:], sep="\n    ", flush=True)
    figures = {word: counts[word] for word in ("equal", "close", "refused", "WRONG", "CRASHED")}
    print(json.dumps({"check": "combinations", "figures": {"trials": asked.trials, **figures, "bad": bad}}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
