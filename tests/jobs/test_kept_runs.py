"""Runs of a benchmark that was cut off are not run again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs.bench.convergence.kept_runs import KeptRuns


class Found(NamedTuple):
    loss: float
    ended: bool


def test_only_what_did_not_end_is_run_again(tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []

    def run(key: tuple[str, ...], seed: int) -> Found:
        calls.append((tuple(key), seed))
        if seed == 2 and len(calls) == 3:
            raise OSError("cut off")
        return Found(seed / 3, True)

    path = tmp_path / "runs.jsonl"
    for _ in range(2):
        kept = KeptRuns(path, Found)
        with ThreadPoolExecutor(1) as pool:
            futures = [kept.submit(pool, run, ("digits", "sgd"), seed) for seed in range(3)]
        path.write_text(path.read_text() + '[[["digits", "sg')
    assert [future.result() for future in futures] == [Found(seed / 3, True) for seed in range(3)]
    assert calls == [(("digits", "sgd"), seed) for seed in (0, 1, 2, 2)]
    assert len(KeptRuns(path, Found)) == 3


def test_without_a_file_nothing_is_kept() -> None:
    kept = KeptRuns(None, Found)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        kept.submit(pool, lambda: Found(1 / 0, True)).result()
    assert len(kept) == 0


def test_what_is_asked_twice_runs_once(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path / "runs.jsonl", Found)
    with ThreadPoolExecutor(2) as pool:
        first, second = (kept.submit(pool, lambda seed: Found(seed, True), 7) for _ in range(2))
    assert first is second
    assert first.result() == Found(7, True)
