"""What looks at a process come to: a leak is seen, a single high look is no slope."""

from __future__ import annotations

import os

import pytest

from jobs.lib.growth import MOST_BYTES, Growth, Look, growth_of

pytestmark = pytest.mark.core

MIB = 1 << 20


def looks(resident_mib: list[float], descriptors: list[int] | None = None) -> list[tuple[float, Look]]:
    counts = descriptors or [8] * len(resident_mib)
    found = zip(resident_mib, counts, strict=True)
    return [(100.0 * at, Look(int(mib * MIB), count, 3)) for at, (mib, count) in enumerate(found)]


def test_a_leak_has_a_slope_and_a_single_high_look_has_none() -> None:
    leaks = growth_of(looks([400 + at for at in range(9)]))
    assert leaks == Growth(MIB / 100, 8 * MIB, 0, 0)
    assert not leaks.flat
    once = growth_of(looks([400, 400, 404, 400, 400, 400]))
    assert (once.slope_bytes, once.most_bytes, once.flat) == (0.0, 4 * MIB, True)
    assert not growth_of(looks([400, 406, 400])).flat, "what was above the limit counts, wherever it came"
    assert growth_of(looks([400, 380, 404])).flat, "less is no growth"
    assert MOST_BYTES == 5 * MIB


def test_descriptors_that_stay_are_growth_and_one_that_goes_again_is_not() -> None:
    assert growth_of(looks([400.0] * 6, [8, 8, 9, 10, 11, 12])).descriptors == 3
    assert growth_of(looks([400.0] * 6, [8, 9, 12, 12, 9, 9])).flat


def test_a_look_at_this_process() -> None:
    look = Look.now(os.getpid())
    assert look.resident_bytes > MIB
    assert look.descriptors >= 3
    assert look.threads >= 1
