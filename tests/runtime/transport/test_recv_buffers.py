"""Memory for messages: used again once nobody refers to it, and never before. Needs no Ray."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.messages import frame
from raypipe.runtime.transport.socket_channel import BufferPool, RecvBuffer
from tests.contract.channel import f

SMALL_BYTES = 256  # large enough to be used again, in these tests


def landed(memory: BufferPool, elements: int) -> tuple[RecvBuffer, torch.Tensor, torch.Tensor]:
    """Room for two tensors, as a channel makes it."""
    form = frame.FrameFormat(0, 2)
    message = frame.encode(f(0), [torch.ones(elements, requires_grad=True), torch.ones(7)], form)
    head = frame.parse(message.header, form)
    landing = RecvBuffer.prepare(head, memory)
    first, second = landing.tensors
    assert first is not None
    assert second is not None
    return landing, first, second


def hold_plainly(x: torch.Tensor) -> object:
    return x


def hold_a_view(x: torch.Tensor) -> object:
    return x.detach()[1:2]


def hold_in_numpy(x: torch.Tensor) -> object:
    return x.detach().numpy()[:1]


def hold_in_a_graph(x: torch.Tensor) -> object:
    return (x * x).sum().grad_fn  # saved for backward, without a Python tensor


def hold_over_dlpack(x: torch.Tensor) -> object:
    return torch.from_dlpack(x.detach())


def hold_the_storage(x: torch.Tensor) -> object:
    return x.untyped_storage()


HOLDS = (hold_plainly, hold_a_view, hold_in_numpy, hold_in_a_graph, hold_over_dlpack, hold_the_storage)


@pytest.mark.slow
@given(st.data())
def test_memory_that_something_holds_is_never_handed_out(data: st.DataObject) -> None:
    memory = BufferPool(SMALL_BYTES, kept_blocks=data.draw(st.integers(1, 3)))
    held: dict[int, tuple[object, range]] = {}
    for number in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            del held[data.draw(st.sampled_from(sorted(held)))]
            continue
        landing, first, second = landed(memory, data.draw(st.sampled_from((64, 100, 128, 500))))
        start = first.data_ptr()
        span = range(start, start + len(landing.memory))
        assert start % 64 == 0
        for _, other in held.values():
            assert span.stop <= other.start or other.stop <= span.start, "still in use"
        hold = data.draw(st.sampled_from(HOLDS))
        held[number] = (
            hold(data.draw(st.sampled_from((first, second)))) if hold is not hold_in_a_graph else hold(first),
            span,
        )
        del landing, first, second


@pytest.mark.slow
def test_a_block_is_used_again_once_the_last_holder_is_gone() -> None:
    for hold in HOLDS:
        memory = BufferPool(SMALL_BYTES)
        landing, first, second = landed(memory, 100)
        start, held = first.data_ptr(), hold(first)
        del landing, first, second
        gc.collect()
        _, other, _ = landed(memory, 100)
        assert other.data_ptr() != start, hold.__name__
        del held
        _, third, _ = landed(memory, 100)
        assert third.data_ptr() == start, hold.__name__


def test_few_blocks_are_kept_and_none_that_is_far_too_large() -> None:
    memory = BufferPool(SMALL_BYTES, kept_blocks=2)
    many = [memory.take(1000) for _ in range(5)]
    del many
    assert len(memory._free) == 2
    large = {block.data_ptr() for block in memory._free}
    assert memory.take(499).numel() == 499
    assert len(memory._free) == 1, "two were free, both more than twice too large; the one is that of 499"
    assert large.isdisjoint(block.data_ptr() for block in memory._free)
    half = memory.take(250)
    assert half.numel() == 250


@pytest.mark.slow
def test_the_last_holder_may_go_in_any_thread() -> None:
    memory = BufferPool(SMALL_BYTES, kept_blocks=2)

    def churn(value: int) -> None:
        for _ in range(300):
            mine = [memory.take(1000).fill_(value) for _ in range(3)]
            wrong.extend(t for t in mine if not bool((t == value).all()))

    wrong: list[torch.Tensor] = []
    threads = [threading.Thread(target=churn, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive()
    assert wrong == []
    assert len(memory._free) <= 2
