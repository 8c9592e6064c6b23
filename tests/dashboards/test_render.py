"""Lines of a board's picture: whole where there are values, and parted where some are missing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.render import Line, in_units, step_between, with_gaps


@given(st.floats(1, 1e6), st.integers(0, 498))
def test_a_line_is_parted_only_where_values_are_missing(span_s: float, missing: int) -> None:
    step_s = step_between(0, span_s)
    count = int(span_s / step_s)
    times_s = [step_s * at for at in range(count + 1)]
    whole = Line("loss", times_s, [1.0] * len(times_s))
    assert with_gaps(whole, 0, span_s) == (whole.times_s, whole.values)
    if missing + 4 < len(times_s):  # three of them
        times_s = times_s[: missing + 1] + times_s[missing + 4 :]
        _, values = with_gaps(Line("loss", times_s, [1.0] * len(times_s)), 0, span_s)
        assert [at for at, value in enumerate(values) if math.isnan(value)] == [missing + 1]


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
    [
        ([0.0005, 0.014], "s", (1e3, "ms")),
        ([0.2, 90.0], "percentunit", (100.0, "%")),
        ([3e6], "Bps", (1e-6, "MB/s")),
        ([5 * 2.0**20, math.nan], "bytes", (2.0**-20, "MiB")),
        ([4.0], "short", (1.0, "")),
        ([], "s", (1.0, "s")),
    ],
)
def test_units_fit_the_largest_value(values: list[float], unit: str, expected: tuple[float, str]) -> None:
    factor, name = in_units(values, unit)
    assert (pytest.approx(factor), name) == expected
