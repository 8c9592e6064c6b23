"""Frames: any tensor comes back as it was; any bytes give a LinkError or tensors that can be used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine import frame
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

ACTION = Action(3, Op.SEND_B, 1 << 40)
GENERATION, MAX_TENSORS = 5, 3
LIMIT_BYTES = 1 << 16
PRELUDE_BYTES = frame.header_bytes(0)
RECORD_BYTES = frame.header_bytes(1) - PRELUDE_BYTES

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


def encoded(message: list[torch.Tensor | None]) -> frame.Frame:
    return frame.encode(ACTION, message, generation=GENERATION, max_tensors=MAX_TENSORS, weight_version=9)


def parsed(header: bytes | bytearray, limit_bytes: int = LIMIT_BYTES) -> frame.Head:
    return frame.parse(header, generation=GENERATION, max_tensors=MAX_TENSORS, payload_limit_bytes=limit_bytes)


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
@given(messages, st.data())
def test_flipped_bits_give_an_error_or_usable_tensors(message: list[torch.Tensor | None], data: st.DataObject) -> None:
    header = bytearray(encoded(message).header)
    # Aim at what is in use: the unused records at the end are not read.
    used_bytes = frame.header_bytes(len(message))
    for _ in range(data.draw(st.integers(1, 6))):
        header[data.draw(st.integers(0, used_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        head = parsed(header)
    except LinkError:
        return
    assert head.payload_bytes <= LIMIT_BYTES
    for tensor in frame.decode(head, torch.zeros(head.payload_bytes, dtype=torch.uint8)):
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


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_noise_in_a_record_gives_an_error_or_usable_tensors(noise: bytes) -> None:
    header = bytearray(encoded([torch.ones(2)]).header)
    header[PRELUDE_BYTES : PRELUDE_BYTES + RECORD_BYTES] = noise
    try:
        head = parsed(header)
    except LinkError:
        return
    frame.decode(head, torch.zeros(head.payload_bytes, dtype=torch.uint8))


def test_encode_does_not_copy() -> None:
    x = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    sent = encoded([x])
    x[0, 0, 0, 0] = 1.0
    (got,) = frame.decode(parsed(sent.header), frame.gather(sent))
    assert got is not None
    assert got[0, 0, 0, 0] == 1.0


def test_the_frame_keeps_its_memory_alive() -> None:
    sent = encoded([torch.arange(1000.0)])
    others = [torch.full((1000,), -1.0) for _ in range(50)]
    (got,) = frame.decode(parsed(sent.header), frame.gather(sent))
    assert torch.equal(got, torch.arange(1000.0))  # type: ignore[arg-type]
    assert len(others) == 50


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
    assert frame.parse(header, generation=GENERATION + 1, max_tensors=MAX_TENSORS).generation == GENERATION
    with pytest.raises(LinkError, match="generation 5"):
        frame.parse(header, generation=GENERATION - 1, max_tensors=MAX_TENSORS)


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
    with pytest.raises(LinkError, match=r"3SEND_B1099511627776.*cannot be sent"):
        encoded([tensor])
