"""Which messages are encoded, how large they become, and codecs that do not exist."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.codec import NONE, Codec, Codecs
from raypipe.engine.codec.choice import CODECS, applies, wire_bytes
from raypipe.errors import ConfigError
from raypipe.ir.schedule import Op

LOSSY = ("bf16", "fp16", "int8", "fp8", "int4")


def test_sizes_are_known_beforehand_and_what_grows_is_left_alone() -> None:
    f32, f16 = torch.float32, torch.float16
    assert [wire_bytes(name, f32, 300) for name in CODECS] == [1200, 600, 600, 300 + 3 * 4, 300 + 3 * 4, 150 + 3 * 4]
    assert [applies(name, f32, 0) for name in CODECS] == [False] * 6
    assert [applies(name, f32, 1) for name in CODECS] == [False, True, True, False, False, False]
    assert [applies(name, f32, 2) for name in CODECS] == [False, True, True, True, True, True]
    assert [applies(name, f16, 300) for name in CODECS] == [False, False, False, True, True, True]
    assert not applies("int8", f16, 3)
    for dtype in (torch.bool, torch.int32, torch.int64, torch.uint8, torch.float64, torch.complex64):
        assert not any(applies(name, dtype, 300) for name in CODECS)


def test_only_activations_and_their_gradients_are_encoded() -> None:
    pair = Codecs(Codec("int8"), Codec("bf16"))
    used = {op: pair.of(op).name for op in Op if pair.of(op) != NONE}
    assert used == {Op.SEND_F: "int8", Op.SEND_B: "bf16"}


def test_a_wrong_codec_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'int7' is not one of 'none', 'bf16', 'fp16', 'int8', 'fp8', 'int4'"):
        Codec("int7")
    with pytest.raises(
        ConfigError, match="'bf16' does not round at random: leave rounding_seed=3 out, or take 'int8' or 'int4'"
    ):
        Codec("bf16", rounding_seed=3)
