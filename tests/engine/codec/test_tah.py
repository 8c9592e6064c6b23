"""tah4 and tah3: small errors of a tile whatever it has, few bytes whatever it has, and NaN where it is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.codec import host, tah
from raypipe.engine.codec.codec import wire_bytes
from raypipe.engine.codec.tah import CHUNK, FORMS, LEAST, TILE

WORST = {"tah4": 0.18, "tah3": 0.36}
"""|error| / |x| of a tile, at most, in Euclidean norms."""
HALVES = (torch.float16, torch.bfloat16)
SIZES = st.integers(1, 700) | st.integers(CHUNK - 200, CHUNK + 200) | st.just(17 * CHUNK + 5)
SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 1e30, -1e30, 2.0**-60)


@st.composite
def values(draw: st.DrawFn) -> torch.Tensor:
    """One dimension: noise at any scale that fits, with heavy tails or without, sparse, constant or with outliers."""
    size, generator = draw(SIZES), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(size, generator=generator) ** draw(st.sampled_from([0, 1, 3, 5]))
    x *= torch.rand(size, generator=generator) < draw(st.sampled_from([0.02, 0.5, 1.0, 1.0]))
    x *= 2.0 ** draw(st.integers(-140, 70))
    for place, number in draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from(SPECIAL), max_size=3)).items():
        x[place] = number
    return x


def sent(name: str, x: torch.Tensor) -> torch.Tensor:
    wire = torch.full((wire_bytes(name, x.dtype, x.numel()),), 0x5A, dtype=torch.uint8)
    host.encode(name, x, wire)
    got = torch.full_like(x, 7.0)
    host.decode(name, wire, got)
    return got


def tile_of(size: int) -> torch.Tensor:
    """By element, the number of its tile, as the table of tah.py says; shares nothing with the code."""
    place = torch.arange(size)
    chunk, of_chunk = place // CHUNK, place % CHUNK
    last = -(-(size % CHUNK) // TILE)
    columns = torch.where(chunk < size // CHUNK, 128, max(last, 1))
    return chunk * 128 + of_chunk % columns


def norms(x: torch.Tensor) -> torch.Tensor:
    """Euclidean norms of tiles."""
    square = torch.zeros(-(-x.numel() // TILE), dtype=torch.float64)
    return square.index_add_(0, tile_of(x.numel()), x.double() ** 2).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@given(values())
def test_the_error_of_a_tile_is_bounded(name: str, x: torch.Tensor) -> None:
    got = sent(name, x)
    assert bool(got.isfinite().all())
    assert bool((norms(got.double() - x.double()) <= WORST[name] * norms(x) + LEAST).all())
    assert torch.equal(got, sent(name, x)), "there is no state"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@given(values(), st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38]), st.data())
def test_a_tile_that_is_not_finite_is_nan_and_no_other(
    name: str, x: torch.Tensor, bad: float, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, x.numel() - 1))
    x[place] = bad
    lost = tile_of(x.numel())
    assert torch.equal(sent(name, x).isnan(), lost == lost[place])


@pytest.mark.parametrize("name", FORMS)
def test_parts_have_no_part_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5 * CHUNK + 1000, generator=torch.Generator().manual_seed(5))
    whole = sent(name, x)
    monkeypatch.setattr(tah, "PART", 2)
    assert torch.equal(sent(name, x), whole)


@pytest.mark.parametrize("name", FORMS)
def test_zeros_are_exact(name: str) -> None:
    x = torch.randn(CHUNK, generator=torch.Generator().manual_seed(5)).view(128, 128)
    x[:, 7] = 0.0
    x[:, 8] = 2.0**-70  # as good as that
    got = sent(name, x.view(-1)).view(128, 128)
    assert not got[:, 7:9].any()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_they_take_16_bit_floats(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = sent(name, x)
    assert got.dtype == dtype
    assert torch.equal(got, sent(name, x.float()).to(dtype)), "rounded once"
    x[:] = torch.finfo(dtype).max
    assert bool(sent(name, x).isfinite().all() if dtype is torch.float16 else sent(name, x).isnan().all())


def of_kind(kind: str, size: int = 1 << 18) -> torch.Tensor:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((size // 512, 512))
    match kind:
        case "heavy tails":
            x = rng.standard_t(3, x.shape)
        case "rectified":
            x = np.maximum(x, 0.0)
        case "gradients of some tokens":
            x *= np.exp(1.5 * rng.standard_normal((len(x), 1)))
        case "outlying channels":
            x[:, rng.integers(0, 512, 5)] += 50.0
        case "noisy outlying channels":
            x[:, rng.integers(0, 512, 5)] *= 60.0
        case "one element":
            x[0, 3] = 3000.0
    return torch.from_numpy(x.astype(np.float32)).view(-1)


@pytest.mark.parametrize(
    "kind",
    ["normal", "heavy tails", "rectified", "gradients of some tokens", "outlying channels", "noisy outlying channels",
     "one element"],
)  # fmt: skip
def test_the_relative_error_is_that_of_normally_distributed_numbers_or_smaller(kind: str) -> None:
    x = of_kind(kind)
    for name, most in (("tah4", 0.05), ("tah3", 0.125)):
        assert float((sent(name, x) - x).norm() / x.norm()) <= most
    assert x.nbytes >= 6.5 * wire_bytes("tah4", x.dtype, x.numel())
    assert x.nbytes >= 8.8 * wire_bytes("tah3", x.dtype, x.numel())
