"""Several stages on a worker change no bit either, whatever sits beside what."""

from __future__ import annotations

import pytest

from tests.exactness import SHAPES, expected, faults, train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "workers", "schedule"),
    [(2, 1, "zb-v"), (3, 1, "interleaved"), (4, 1, "interleaved"), (6, 2, "interleaved"), (6, 3, "zb-v"),
     (4, 4, "interleaved")],
)  # fmt: skip
def test_any_number_of_workers(stages: int, workers: int, schedule: str) -> None:
    shape = SHAPES["ragged-microbatch"]
    run = train("unet", stages, shape, schedule, "sgd", workers=workers)
    assert faults("unet", run, expected("unet", shape, "sgd")) == []
    assert len({report.worker for report in run.reports[0]}) == workers


@pytest.mark.slow
def test_what_crosses_no_link_is_no_traffic() -> None:
    shape = SHAPES["even"]
    told = train("sequential", 4, shape, "zb-v", "sgd").reports[-1]
    apart = train("sequential", 4, shape, "1f1b", "sgd").reports[-1]
    assert [report.sent_bytes[0] > 0 for report in told] == [True, False, True, False]
    norm_and_loss = 8  # which stage 2 hands to stage 3 where that is on another worker
    assert told[2].sent_bytes[0] == apart[2].sent_bytes[0] - norm_and_loss
