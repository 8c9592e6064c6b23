"""Codecs: what comes back is within the stated bound of what was sent, and what is not finite stays so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.codec import NONE, Codec, Codecs, host
from raypipe.engine.codec.codec import BLOCK, CODECS, applies, wire_bytes
from raypipe.errors import ConfigError
from raypipe.ir.schedule import Op
from raypipe.splitmix import mixed

LOSSY = ("bf16", "fp16", "int8", "fp8", "int4")
LEVELS = {"int8": host.INT8, "fp8": host.FP8, "int4": host.INT4}
HALVES = (torch.float16, torch.bfloat16)

# Every float32 by its bits: NaN of all kinds, infinities, denormals and huge numbers are as likely as their exponents.
any_bits = st.integers(0, (1 << 32) - 1)
finite_bits = any_bits.filter(lambda bits: bits & 0x7F800000 != 0x7F800000)
MOST = float(np.finfo(np.float32).max)
SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 2.0**-126, MOST, -MOST, 65519.0, 65520.0, host.INT8.least, 1.0)


def of_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


@st.composite
def values(draw: st.DrawFn, bits: st.SearchStrategy[int] = finite_bits) -> torch.Tensor:
    """One dimension, up to three blocks, odd sizes: noise at any scale with some numbers of any bits in it."""
    size = draw(st.integers(1, 2 * BLOCK + 9))
    scale = 2.0 ** draw(st.integers(-149, 120))
    noise = torch.randn(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).double() * scale
    noise = noise.float()
    for place, number in draw(st.dictionaries(st.integers(0, size - 1), bits, max_size=4)).items():
        noise[place] = of_bits([number])[0]
    if draw(st.booleans()):
        noise[draw(st.integers(0, size - 1))] = draw(st.sampled_from(SPECIAL))
    return noise


def sent(name: str, x: torch.Tensor, key: int | None = None) -> torch.Tensor:
    wire = torch.full((wire_bytes(name, x.dtype, x.numel()),), 0x5A, dtype=torch.uint8)
    host.encode(name, x, wire, key)
    got = torch.full_like(x, 7.0)
    host.decode(name, wire, got)
    return got


def blockwise_largest(x: torch.Tensor) -> torch.Tensor:
    """By element, the largest magnitude of its block; plain Python, so that it shares nothing with the code."""
    numbers = [abs(v) for v in x.double().tolist()]
    return torch.tensor([max(numbers[i - i % BLOCK : i - i % BLOCK + BLOCK]) for i in range(len(numbers))]).double()


def bound(name: str, x: torch.Tensor, *, at_random: bool = False) -> torch.Tensor:
    """The largest error that engine/codec states, with the last bits of float32 for its arithmetic."""
    size = x.double().abs()
    if name == "bf16":
        return size * 2.0**-8 + 2.0**-126
    if name == "fp16":
        return size * 2.0**-11 + 2.0**-25
    largest, (most, least) = blockwise_largest(x), LEVELS[name]
    if name == "fp8":
        found = size * 2.0**-4 + largest * 2.0**-18
    else:
        found = largest / (most if at_random else 2 * most)
    return torch.where(largest < least, largest, found * (1 + 2.0**-13))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
@given(values())
def test_the_error_is_bounded(name: str, x: torch.Tensor) -> None:
    got = sent(name, x)
    fits = x.double().abs() < {"bf16": 3.39617e38, "fp16": 65520.0}.get(name, 1e39)
    assert torch.equal(got.isfinite(), fits), "what is too large becomes infinite, and nothing else"
    assert bool(((got.double() - x.double()).abs() <= bound(name, x))[fits].all())
    assert bool((got.sign() * x.sign() >= 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
@given(values(), st.integers(0, (1 << 64) - 1))
def test_the_error_of_rounding_at_random_is_bounded_by_a_step(name: str, x: torch.Tensor, key: int) -> None:
    got = sent(name, x, key)
    assert bool(((got.double() - x.double()).abs() <= bound(name, x, at_random=True)).all())
    assert torch.equal(got, sent(name, x, key)), "the same key, the same bits"


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
@given(values(any_bits), st.sampled_from([float("nan"), float("inf"), -float("inf"), None]), st.data())
def test_what_is_not_finite_stays_so(name: str, x: torch.Tensor, bad: float | None, data: st.DataObject) -> None:
    if bad is not None:
        x[data.draw(st.integers(0, x.numel() - 1))] = bad
    got = sent(name, x)
    assert bool((~got.isfinite())[~x.isfinite()].all())
    if name in LEVELS:
        lost = blockwise_largest(torch.where(x.isfinite(), 0.0, 1.0)) > 0
        assert torch.equal(got.isnan(), lost), "a block is NaN, all of it and no other"
    else:
        assert torch.equal(got.isnan(), x.isnan())
        assert torch.equal(got[x.isinf()], x[x.isinf()])


@given(st.integers(0, 5), st.integers(0, 1000))
def test_a_part_is_encoded_as_in_the_whole(parts: int, rest: int) -> None:
    """The draws of stochastic rounding belong to positions."""
    size = parts * 2 * BLOCK + rest
    x = torch.randn(size, generator=torch.Generator().manual_seed(5))
    for name in ("int8", "int4"):
        for key in (None, 77):
            whole, by_parts = (torch.empty(wire_bytes(name, x.dtype, size), dtype=torch.uint8) for _ in range(2))
            host.encode(name, x, whole, key)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(host, "PART", 2 * BLOCK)
                host.encode(name, x, by_parts, key)
            assert torch.equal(whole, by_parts)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_codecs_by_blocks_take_16_bit_floats(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = sent(name, x)
    assert got.dtype == dtype
    half_ulp = got.double().abs() * 2.0**-8
    assert bool(((got.double() - x.double()).abs() <= bound(name, x) + half_ulp).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_whole_steps_and_zeros_are_exact(name: str) -> None:
    most = LEVELS[name].most
    steps = torch.arange(-most, most + 1, dtype=torch.float32).repeat(BLOCK // most)
    x = torch.cat([steps[:BLOCK], steps[-BLOCK:], torch.zeros(BLOCK), steps[:3] * 2.0**-40])
    for key in (None, 1, 2, 3):
        assert torch.equal(sent(name, x, key), x)


@pytest.mark.slow
def test_rounding_at_random_has_the_right_mean() -> None:
    """Over many messages the mean error of each element vanishes; that of rounding to nearest does not."""
    x = torch.linspace(-1, 0.97, BLOCK)
    rounds = 4000
    total = torch.zeros(BLOCK, dtype=torch.float64)
    for microbatch in range(rounds):
        total += sent("int8", x, mixed(11, 2, 3, microbatch, 0)).double()
    error = (total / rounds - x.double()).abs() * 127
    # One step has a standard deviation of at most 1/2; none of 128 elements should be five of them off.
    assert error.max().item() < 5 * 0.5 / rounds**0.5
    assert (sent("int8", x) - x).abs().max().item() * 127 > 0.3


def test_sizes_are_known_beforehand_and_what_grows_is_left_alone() -> None:
    f32, f16 = torch.float32, torch.float16
    assert [wire_bytes(name, f32, 300) for name in CODECS] == [
        1200, 600, 600, 300 + 3 * 4, 300 + 3 * 4, 150 + 3 * 4, 3 * (12 + 2 + 64), 3 * (24 + 2 + 32),
    ]  # fmt: skip
    assert [applies(name, f32, 0) for name in CODECS] == [False] * 8
    assert [applies(name, f32, 1) for name in CODECS] == [False, True, True, False, False, False, False, False]
    assert [applies(name, f32, 2) for name in CODECS] == [False, True, True, True, True, True, False, False]
    assert [applies(name, f32, 20) for name in CODECS] == [False, True, True, True, True, True, True, True]
    assert [applies(name, f16, 300) for name in CODECS] == [False, False, False, True, True, True, True, True]
    assert not applies("int8", f16, 3)
    for dtype in (torch.bool, torch.int32, torch.int64, torch.uint8, torch.float64, torch.complex64):
        assert not any(applies(name, dtype, 300) for name in CODECS)


def test_only_activations_and_their_gradients_are_encoded() -> None:
    pair = Codecs(Codec("int8"), Codec("bf16"))
    used = {op: pair.of(op).name for op in Op if pair.of(op) != NONE}
    assert used == {Op.SEND_F: "int8", Op.SEND_B: "bf16"}


def test_a_wrong_codec_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="'int7' is not one of 'none', 'bf16', 'fp16', 'int8', 'fp8', 'int4', 'tah4', 'tah3'"
    ):
        Codec("int7")
    with pytest.raises(
        ConfigError, match="'bf16' does not round at random: leave rounding_seed=3 out, or take 'int8' or 'int4'"
    ):
        Codec("bf16", rounding_seed=3)
