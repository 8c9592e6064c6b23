"""Frames: any tensor comes back as it was; any bytes give a LinkError or tensors that can be used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.codec import NONE, Codec
from raypipe.engine.codec.codec import CODECS, applies
from raypipe.engine.messages import frame
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

ACTION = Action(3, Op.SEND_B, 1 << 40)
GENERATION, MAX_TENSORS = FORM = frame.FrameFormat(5, 3)
LIMIT_BYTES = 1 << 16
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Dense, permuted, sliced, expanded, conjugated and empty tensors with up to five dimensions."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(len(shape)):
        change = draw(st.sampled_from(("keep", "keep", "step", "tail", "expand")))
        if change == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "tail":
            tensor = tensor[(slice(None),) * dim + (slice(1, None),)]
        elif change == "expand" and tensor.shape[dim] == 1:
            tensor = tensor.expand(*(3 if d == dim else -1 for d in range(tensor.dim())))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if (dtype.is_floating_point or dtype.is_complex) and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


messages = st.lists(st.none() | tensors(), max_size=MAX_TENSORS)


codecs = st.sampled_from([Codec(name) for name in CODECS] + [Codec("int8", rounding_seed=5)])


def encoded(message: list[torch.Tensor | None], codec: Codec = NONE, action: Action = ACTION) -> frame.Frame:
    return frame.encode(action, message, FORM, 9, codec)


def parsed(header: bytes | bytearray, limit_bytes: int = LIMIT_BYTES) -> frame.Head:
    return frame.parse(header, FORM, limit_bytes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Independent of the code under test: the distinct elements are all of the memory between first and last."""
    if tensor.numel() == 0:
        return True
    index = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, stride in enumerate(tensor.stride()):
        place = torch.arange(tensor.shape[dim]) * stride
        index = index + place.reshape([-1 if d == dim else 1 for d in range(tensor.dim())])
    distinct = index.unique()
    moving = [s for s, t in zip(tensor.shape, tensor.stride(), strict=True) if t != 0]
    return len(distinct) == int(distinct[-1]) + 1 == int(torch.tensor(moving).prod())


@pytest.mark.slow
@given(messages)
def test_round_trip(message: list[torch.Tensor | None]) -> None:
    sent = encoded(message)
    assert len(sent.header) == frame.header_bytes(MAX_TENSORS)
    assert sum(b.nbytes for b in sent.buffers) == sent.payload_bytes
    head = parsed(sent.header)
    assert head[:4] == (GENERATION, ACTION, 9, sent.payload_bytes)
    got = frame.decode(head, frame.gather(sent))
    assert len(got) == len(message)
    for mine, theirs in zip(message, got, strict=True):
        if mine is None:
            assert theirs is None
            continue
        assert theirs is not None
        assert theirs.dtype == mine.dtype
        assert theirs.shape == mine.shape
        assert torch.equal(theirs, mine)
        assert theirs.requires_grad == mine.requires_grad
        assert theirs.is_leaf
        assert theirs.numel() == 0 or theirs.data_ptr() % 64 == 0
        if is_dense(mine) and not mine.is_conj():
            assert theirs.stride() == mine.stride()
        else:
            assert is_dense(theirs)


@pytest.mark.slow
@given(messages, codecs)
def test_round_trip_in_a_codec(message: list[torch.Tensor | None], codec: Codec) -> None:
    """Type, shape, strides and flags as without; values as the codec makes them of the elements in memory's order."""
    sent = encoded(message, codec)
    assert sum(b.nbytes for b in sent.buffers) == sent.payload_bytes
    head, plain = parsed(sent.header), parsed(encoded(message).header)
    assert head.payload_bytes <= plain.payload_bytes
    got = frame.decode(head, frame.gather(sent))
    exact = frame.decode(plain, frame.gather(encoded(message)))
    for record, mine, theirs in zip(head.records, exact, got, strict=True):
        if mine is None or theirs is None or record is None:
            assert mine is theirs is record
            continue
        assert (theirs.dtype, theirs.shape, theirs.stride()) == (mine.dtype, mine.shape, mine.stride())
        assert theirs.requires_grad == mine.requires_grad
        assert theirs.is_leaf
        assert theirs.numel() == 0 or theirs.data_ptr() % 64 == 0
        assert record.codec == (codec.name if applies(codec.name, mine.dtype, record.elements) else "none")
        if record.codec == "none":
            assert torch.equal(theirs, mine)
        else:
            largest = mine.detach().abs().max().item() * (1 + 2.0**-13)
            close = {
                "bf16": (2.0**-8, 0.0), "fp16": (2.0**-11, 2.0**-25), "fp8": (2.0**-3.8, largest * 2.0**-18),
                "int8": (2.0**-8, largest / (254 if codec.rounding_seed is None else 127)),
                "int4": (2.0**-8, largest / 14), "tah4": (2.0**-8, largest), "tah3": (2.0**-8, 2 * largest),
            }  # fmt: skip
            relative, absolute = close[record.codec]
            assert torch.allclose(theirs, mine, rtol=relative, atol=absolute)


def test_a_forward_message_keeps_what_needs_no_gradient_exact() -> None:
    """Masks, positions, and all of an evaluation."""
    x = torch.full((1000,), 1 / 3)
    forward = Action(1, Op.SEND_F, 0)
    for action, requires_grad, coded in ((forward, True, True), (forward, False, False), (ACTION, False, True)):
        head = parsed(encoded([x.clone().requires_grad_(requires_grad)], Codec("bf16"), action).header)
        assert head.payload_bytes == (2000 if coded else 4000)
        assert frame.is_coded(head) is coded


def test_draws_belong_to_seed_message_and_place() -> None:
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))

    def payload(seed: int | None, action: Action = ACTION, place: int = 0) -> bytes:
        message = encoded([None] * place + [x], Codec("int8", rounding_seed=seed), action)
        return b"".join(message.buffers)

    assert payload(1) == payload(1)
    others = [payload(None), payload(1), payload(2), payload(1, place=1), payload(1, ACTION._replace(microbatch=4))]
    assert len(set(others)) == len(others)


@pytest.mark.slow
@given(messages, codecs, st.integers(0, 255), st.data())
def test_flipped_bits_give_an_error_or_usable_tensors(
    message: list[torch.Tensor | None], codec: Codec, fill: int, data: st.DataObject
) -> None:
    header = bytearray(encoded(message, codec).header)
    # Aim at what is in use: the unused records at the end are not read.
    used_bytes = frame.header_bytes(len(message))
    for _ in range(data.draw(st.integers(1, 6))):
        header[data.draw(st.integers(0, used_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        head = parsed(header)
    except LinkError:
        return
    assert head.payload_bytes <= LIMIT_BYTES
    for tensor in frame.decode(head, torch.full((head.payload_bytes,), fill, dtype=torch.uint8)):
        if tensor is not None:
            assert tensor.numel() * tensor.itemsize <= LIMIT_BYTES
            tensor.clone()  # reads every element


@given(st.binary(max_size=frame.header_bytes(MAX_TENSORS)))
def test_any_bytes_give_an_error(noise: bytes) -> None:
    with pytest.raises(LinkError):
        parsed(noise)
    header = encoded([torch.ones(2)]).header
    with pytest.raises(LinkError):
        parsed(header[: len(noise) // 2])


def test_encode_does_not_copy() -> None:
    x = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    sent = encoded([x])
    x[0, 0, 0, 0] = 1.0
    (got,) = frame.decode(parsed(sent.header), frame.gather(sent))
    assert got is not None
    assert got[0, 0, 0, 0] == 1.0


def test_an_expanded_tensor_sends_its_distinct_elements() -> None:
    assert encoded([torch.ones(1, 7).expand(1000, 7)]).payload_bytes == 28


def test_an_overlapping_tensor_is_packed() -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    sent = encoded([windows])
    (got,) = frame.decode(parsed(sent.header), frame.gather(sent))
    assert torch.equal(got, windows)  # type: ignore[arg-type]
    assert sent.payload_bytes == 4 * 12


def test_older_generations_pass_and_newer_ones_do_not() -> None:
    header = encoded([None]).header
    assert frame.parse(header, FORM._replace(generation=GENERATION + 1)).generation == GENERATION
    with pytest.raises(LinkError, match="generation 5"):
        frame.parse(header, FORM._replace(generation=GENERATION - 1))


def test_a_payload_beyond_the_limit_is_refused_before_it_is_allocated() -> None:
    header = encoded([torch.zeros(1 << 15, dtype=torch.float32)]).header
    assert parsed(header, 1 << 17).payload_bytes == 1 << 17
    with pytest.raises(LinkError, match="allowed"):
        parsed(header, (1 << 17) - 1)


def test_an_expansion_beyond_the_limit_is_refused_though_it_sends_one_element() -> None:
    with pytest.raises(LinkError, match="bytes are allowed"):
        encoded([torch.ones(1).expand(1 << 40)])


def test_a_payload_of_another_size_is_refused() -> None:
    head = parsed(encoded([torch.ones(4)]).header)
    with pytest.raises(LinkError, match="16 bytes"):
        frame.decode(head, torch.zeros(15, dtype=torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).reshape((1,) * 9),
        torch.eye(2).to_sparse(),
        torch.ones(1, device="meta"),
        torch.ones(1).to(torch.float8_e5m2),
    ],
    ids=["nine dimensions", "sparse", "elsewhere", "type"],
)
def test_what_cannot_be_sent_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(LinkError, match=r"3SEND_B0 \(micro-batch 0 of the evaluations\).*cannot be sent"):
        encoded([tensor])
