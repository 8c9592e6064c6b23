"""The contract of a channel, as tests that every implementation inherits.

A subclass provides ``open_pair``; nothing here knows how the two ends are joined.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch

from raypipe.engine.codec import NONE, Codec, host
from raypipe.engine.codec.codec import CodedTensor
from raypipe.engine.messages.channel import Channel
from raypipe.engine.messages.frame import PendingCopy
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action, Op
from tests.waiting import wait_until

WAIT_S = 60.0
"""Deadline of every wait that is meant to succeed."""

WAKE_S = 30.0
"""Bound asserted on a wake-up, below the deadline. The promise is 0.05 s, which a loaded machine cannot keep."""

Pair = tuple[Channel, Channel]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def f(microbatch: int) -> Action:
    """What stage 0 sends forward."""
    return Action(0, Op.SEND_F, microbatch)


def b(microbatch: int) -> Action:
    """What stage 1 sends back."""
    return Action(1, Op.SEND_B, microbatch)


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Reproducible values of any type."""
    raw = torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 50
    return raw > 0 if dtype is torch.bool else raw.to(dtype)


CODECS = {
    "none": (NONE, 0.0),
    "bf16": (Codec("bf16"), 2.0**-8),
    "fp16": (Codec("fp16"), 2.0**-11),
    "int8": (Codec("int8"), 1 / 253),
    "int8_at_random": (Codec("int8", rounding_seed=3), 1 / 126),
    "fp8": (Codec("fp8"), 1 / 15.9),
    "int4": (Codec("int4"), 1 / 13.9),
    "tah4": (Codec("tah4"), 1 / 8),
    "tah3": (Codec("tah3"), 1 / 3),
}
"""Each codec, and its largest error as a share of the largest value."""

LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3),
    "offset": lambda t: t[1:],
    "expanded": lambda t: t[:, :1].contiguous().expand(-1, 5, -1, -1),
    "expanded_in_front": lambda t: t.expand(3, *t.shape),
    "scalar": lambda t: t[0, 0, 0, 0],
    "empty": lambda t: t[:0],
    "one": lambda t: t[:1, :1, :1, :1],
}


class Failing:
    """A thread that is expected to end in a LinkError, and notes when it did."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self.ended_s = 0.0
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001  (whatever it is, the test shall see it)
            self.error = error
        self.ended_s = time.monotonic()

    def result(self) -> LinkError:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "still waiting"
        assert isinstance(self.error, LinkError), repr(self.error)
        return self.error


def refused(end: Channel, action: Action) -> LinkError | None:
    """The error of sending now, if there is one."""
    try:
        end.send(action, (torch.ones(1),))
    except LinkError as error:
        return error
    return None


class ChannelContract:
    """Inherit, and implement ``open_pair``."""

    def open_pair(self, max_tensors: int = 4) -> Pair:
        """Two joined ends; (stage 0, stage 1)."""
        raise NotImplementedError

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        ends = self.open_pair()
        yield ends
        for end in ends:
            end.close()

    def test_a_message_arrives_under_its_senders_action(self, pair: Pair) -> None:
        x = sample(torch.float32, 3, 4)
        pair[0].send(f(5), (x,))
        (got,) = pair[1].recv(f(5), WAIT_S)
        assert got is not None
        assert torch.equal(got, x)
        assert got.data_ptr() != x.data_ptr(), "a channel copies"
        assert got.data_ptr() % 64 == 0

    def test_a_message_carries_its_weight_version(self, pair: Pair) -> None:
        for m, version in enumerate((0, 7, 7, (1 << 32) - 1)):
            pair[0].send(f(m), (torch.zeros(2),), version)
            assert pair[1].recv(f(m), WAIT_S).weight_version == version

    def test_messages_are_found_by_action_in_any_order(self, pair: Pair) -> None:
        for m in range(6):
            pair[0].send(f(m), (torch.full((2,), float(m)),))
            pair[1].send(b(m), (torch.full((2,), -float(m)),))
        for m in (3, 0, 5, 1, 4, 2):
            assert pair[1].recv(f(m), WAIT_S)[0].tolist() == [m, m]  # type: ignore[union-attr]
            assert pair[0].recv(b(m), WAIT_S)[0].tolist() == [-m, -m]  # type: ignore[union-attr]

    def test_several_tensors_with_gaps(self, pair: Pair) -> None:
        message = (sample(torch.float32, 5), None, sample(torch.bool, 3, 3), sample(torch.int64, 2))
        pair[0].send(f(0), message)
        got = pair[1].recv(f(0), WAIT_S)
        assert [t is None for t in got] == [False, True, False, False]
        for mine, theirs in zip(message, got, strict=True):
            assert mine is theirs or torch.equal(mine, theirs)  # type: ignore[arg-type]
        assert all(t is None or t.data_ptr() % 64 == 0 for t in got)

    def test_a_message_may_hold_nothing(self, pair: Pair) -> None:
        pair[0].send(f(0), ())
        pair[0].send(f(1), (None,))
        assert pair[1].recv(f(0), WAIT_S) == ()
        assert pair[1].recv(f(1), WAIT_S) == (None,)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_type_keeps_values_and_strides(self, pair: Pair, layout: str) -> None:
        for m, dtype in enumerate((*FLOATS, *INTS)):
            x = LAYOUTS[layout](sample(dtype, 2, 3, 4, 5))
            pair[0].send(f(m), (x,))
            (got,) = pair[1].recv(f(m), WAIT_S)
            assert got is not None
            assert got.dtype == x.dtype
            assert got.shape == x.shape
            assert got.stride() == x.stride()
            assert torch.equal(got, x)

    def test_a_tensor_with_gaps_is_packed_in_the_order_of_its_strides(self, pair: Pair) -> None:
        x = sample(torch.float32, 6, 8)[::2, ::2].t()
        pair[0].send(f(0), (x,))
        (got,) = pair[1].recv(f(0), WAIT_S)
        assert got is not None
        assert torch.equal(got, x)
        assert got.stride() == (1, 4)

    @pytest.mark.parametrize("name", CODECS)
    def test_a_codec_keeps_layouts_flags_and_all_that_is_no_activation(self, pair: Pair, name: str) -> None:
        codec, share = CODECS[name]
        pair[0].use(codec, NONE)  # nobody tells the other end
        exact = (sample(torch.int64, 40), sample(torch.bool, 40), sample(torch.float32, 40))
        for m, layout in enumerate(LAYOUTS):
            x = LAYOUTS[layout](sample(torch.float32, 2, 3, 4, 5)).detach().requires_grad_()
            pair[0].send(f(m), (x, *exact))
            got, *others = pair[1].recv(f(m), WAIT_S)
            assert got is not None
            assert (got.dtype, got.shape, got.stride()) == (x.dtype, x.shape, x.stride())
            assert got.is_leaf
            assert got.requires_grad
            assert got.numel() == 0 or got.data_ptr() % 64 == 0
            assert x.numel() == 0 or (got - x).abs().max() <= share * x.abs().max()
            for mine, theirs in zip(exact, others, strict=True):
                assert torch.equal(mine, theirs)  # type: ignore[arg-type]

    def test_each_direction_has_its_codec_and_may_change_it_at_any_message(self, pair: Pair) -> None:
        x = torch.full((1000,), 1 / 3)
        pair[1].use(Codec("int8"), Codec("fp16"))
        got = []
        for m, name in enumerate((*CODECS, "none", "int8")):
            pair[0].use(CODECS[name][0], NONE)
            pair[0].send(f(m), (x.clone().requires_grad_(),))
            pair[1].send(b(m), (x,))
            pair[1].send(Action(1, Op.REDUCE_NORM, m), (x,))
        for m in range(len(CODECS) + 2):
            got.append(pair[1].recv(f(m), WAIT_S)[0].detach())  # type: ignore[union-attr]
            (back,), (norm,) = pair[0].recv(b(m), WAIT_S), pair[0].recv(Action(1, Op.REDUCE_NORM, m), WAIT_S)
            assert torch.equal(back, x.half().float())  # type: ignore[arg-type]
            assert torch.equal(norm, x), "only activations and their gradients"  # type: ignore[arg-type]
        assert torch.equal(got[0], x)
        assert torch.equal(got[1], x.bfloat16().float())
        assert torch.equal(got[2], x.half().float())
        assert torch.equal(got[-2], x)
        assert torch.equal(got[-1], got[3])

    def test_whoever_decodes_itself_gets_the_bytes_and_what_it_encoded_goes_as_it_is(self, pair: Pair) -> None:
        x = torch.linspace(-3.0, 3.0, 384).view(2, 192).t().requires_grad_()
        for end, other, action in ((*pair, f(0)), (*pair[::-1], b(0))):
            end.use(Codec("int8"), Codec("int8"))
            other.leave_coded()
            end.send(action, (x, torch.arange(3)))
            came, exact = other.recv(action, WAIT_S)
            assert isinstance(came, CodedTensor)  # type: ignore[unreachable]
            assert torch.equal(exact, torch.arange(3))  # type: ignore[unreachable]
            assert (came.codec, came.dtype, came.shape, came.strides) == ("int8", x.dtype, tuple(x.shape), x.stride())
            assert (came.requires_grad, came.nbytes, came.elements) == (True, x.nbytes, 384)
            wire = torch.empty(came.wire.numel(), dtype=torch.uint8)
            host.encode("int8", x.detach().t().reshape(-1), wire)
            assert torch.equal(came.wire, wire)
            end.send(action._replace(microbatch=1), (came,))  # whatever codec the link has
            (again,) = other.recv(action._replace(microbatch=1), WAIT_S)
            assert torch.equal(again.wire, wire)

    def test_who_sends_waits_for_what_comes_late_and_not_who_hands_it_over(self, pair: Pair) -> None:
        if pair[0].on_device:
            pytest.skip("nothing is copied to the host")
        late, may_come = torch.zeros(300), threading.Event()

        def arrive() -> None:
            assert may_come.wait(WAIT_S)
            late.fill_(7.0)

        pair[0].send(f(0), PendingCopy.of((late, None), arrive))
        pair[0].send(f(1), (torch.ones(1),))
        may_come.set()
        assert torch.equal(pair[1].recv(f(0), WAIT_S)[0], torch.full((300,), 7.0))  # type: ignore[arg-type]
        assert torch.equal(pair[1].recv(f(1), WAIT_S)[0], torch.ones(1))  # type: ignore[arg-type]

    def test_closing_delivers_what_comes_late(self, pair: Pair) -> None:
        if pair[0].on_device:
            pytest.skip("nothing is copied to the host")
        late = torch.zeros(3)

        def arrive() -> None:
            time.sleep(0.05)
            late.fill_(7.0)

        pair[0].send(f(0), PendingCopy.of((late,), arrive))
        pair[0].close()
        assert torch.equal(pair[1].recv(f(0), WAIT_S)[0], torch.full((3,), 7.0))  # type: ignore[arg-type]

    def test_what_never_comes_fails_the_link(self, pair: Pair) -> None:
        if pair[0].on_device:
            pytest.skip("nothing is copied to the host")

        def arrive() -> None:
            raise RuntimeError("the device is gone")

        pair[0].send(f(0), PendingCopy.of((torch.zeros(3),), arrive))
        with pytest.raises(LinkError, match="the device is gone"):
            pair[1].recv(f(0), WAIT_S)

    @pytest.mark.slow
    def test_large_messages_in_a_codec(self, pair: Pair) -> None:
        """Beyond what is received ahead, and beyond what is given memory that was used before."""
        for m, elements in enumerate(((1 << 18) + 1, 1 << 21, (1 << 24) + 5)):
            x = torch.rand(elements, generator=torch.Generator().manual_seed(m)).requires_grad_()
            for k, (codec, share) in enumerate(CODECS.values()):
                pair[0].use(codec, NONE)
                pair[0].send(f(10 * m + k), (x,))
                (got,) = pair[1].recv(f(10 * m + k), WAIT_S)
                assert got is not None
                assert (got - x).abs().max() <= share

    def test_gradient_flags_arrive_on_leaves(self, pair: Pair) -> None:
        weight = sample(torch.float32, 3).requires_grad_()
        pair[0].send(f(0), (weight * 2, weight.detach(), sample(torch.int64, 2)))
        first, second, third = pair[1].recv(f(0), WAIT_S)
        assert first is not None
        assert second is not None
        assert third is not None
        assert (first.requires_grad, second.requires_grad, third.requires_grad) == (True, False, False)
        assert first.is_leaf
        (first * second).sum().backward()
        assert first.grad is not None

    def test_writing_to_one_tensor_does_not_invalidate_another(self, pair: Pair) -> None:
        """Views of one buffer would share a version counter, and backward would refuse to run."""
        pair[0].send(f(0), (sample(torch.float32, 3).requires_grad_(), sample(torch.float32, 3)))
        kept, scratch = pair[1].recv(f(0), WAIT_S)
        assert kept is not None
        assert scratch is not None
        loss = (kept * kept).sum()
        scratch.add_(1)
        loss.backward()

    def test_the_deadline_names_the_edge(self, pair: Pair) -> None:
        with pytest.raises(LinkError) as caught:
            pair[1].recv(f(17), 0.02)
        text = str(caught.value)
        assert pair[1].name in text
        assert "0SEND_F17" in text
        assert "micro-batch 17" in text
        assert "0.02 s" in text
        pair[0].send(f(17), (torch.ones(1),))
        assert len(pair[1].recv(f(17), WAIT_S)) == 1, "a missed deadline does not break the link"

    def test_abort_wakes_both_sides(self, pair: Pair) -> None:
        for aborter in (0, 1):
            ends = pair if aborter == 0 else self.open_pair()
            waits = [Failing(partial(ends[0].recv, b(0), WAIT_S)), Failing(partial(ends[1].recv, f(0), WAIT_S))]
            time.sleep(0.02)
            start_s = time.monotonic()
            ends[aborter].abort("stage 7 died")
            for side, wait in enumerate(waits):
                assert "stage 7 died" in str(wait.result())
                woken_s = wait.ended_s - start_s
                print(f"abort by {aborter}: side {side} woke after {woken_s * 1e3:.2f} ms")
                assert woken_s < WAKE_S
            for end, action in ((ends[0], f(1)), (ends[1], b(1))):
                with pytest.raises(LinkError, match="stage 7 died"):
                    end.send(action, (torch.ones(1),))
                with pytest.raises(LinkError, match="stage 7 died"):
                    end.recv(action, WAIT_S)
                end.close()

    def test_one_failure_wakes_many_waiters(self, pair: Pair) -> None:
        waits = [Failing(partial(pair[1].recv, f(m), WAIT_S)) for m in range(5)]
        time.sleep(0.02)
        pair[1].abort("no reason")
        for m, wait in enumerate(waits):
            assert f"0SEND_F{m}" in str(wait.result())

    def test_close_delivers_what_was_sent(self, pair: Pair) -> None:
        for m in range(10):
            pair[0].send(f(m), (torch.full((1000,), float(m)),))
        pair[0].close()
        pair[0].close()
        for m in range(10):
            (got,) = pair[1].recv(f(m), WAIT_S)
            assert got is not None
            assert got[-1].item() == m
        with pytest.raises(LinkError, match="clos"):
            pair[1].recv(f(10), WAIT_S)
        with pytest.raises(LinkError):
            pair[0].send(f(11), (torch.ones(1),))

    def test_leaving_delivers_what_was_sent_and_then_says_why(self, pair: Pair) -> None:
        for m in range(10):
            pair[0].send(f(m), (torch.full((100_000,), float(m)),))
        pair[0].leave("stage 0 failed")
        pair[0].leave("again")
        for m in range(10):
            (got,) = pair[1].recv(f(m), WAIT_S)
            assert got is not None
            assert got[-1].item() == m
        with pytest.raises(LinkAbortedError, match="stage 0 failed"):
            pair[1].recv(f(10), WAIT_S)
        for end, action in ((pair[0], f(11)), (pair[1], b(11))):
            wait_until(lambda end=end, action=action: isinstance(refused(end, action), LinkAbortedError))
        with pytest.raises(LinkAbortedError, match="stage 0 failed"):
            pair[0].recv(b(0), WAIT_S)

    def test_too_many_tensors_are_refused_by_the_sender(self, pair: Pair) -> None:
        with pytest.raises(LinkError, match="5 tensors"):
            pair[0].send(f(0), [torch.ones(1)] * 5)
        pair[0].send(f(0), [torch.ones(1)] * 4)
        assert len(pair[1].recv(f(0), WAIT_S)) == 4

    def test_an_action_sent_twice_is_an_error(self, pair: Pair) -> None:
        pair[0].send(f(0), (torch.ones(1),))
        pair[0].send(f(0), (torch.ones(1),))
        with pytest.raises(LinkError, match="twice"):
            pair[1].recv(f(1), WAIT_S)

    def test_send_does_not_wait_for_a_slow_reader(self, pair: Pair) -> None:
        """32 MiB is more than the buffers of two sockets hold."""
        x = torch.arange(1 << 18, dtype=torch.float32)
        longest_s = 0.0
        for m in range(32):
            start_s = time.monotonic()
            pair[0].send(f(m), (x,))
            longest_s = max(longest_s, time.monotonic() - start_s)
        print(f"longest send of 1 MiB: {longest_s * 1e3:.2f} ms")
        assert longest_s < WAKE_S
        for m in reversed(range(32)):
            (got,) = pair[1].recv(f(m), WAIT_S)
            assert got is not None
            assert torch.equal(got, x)

    def test_sizes_that_change_at_any_message(self, pair: Pair) -> None:
        """A medium may expect the size that came before, or treat the large ones in another way from 1 MiB on."""
        mib = 1 << 20
        sizes = [0, 1, 63, 64, 65, 4097, 100, 100, 99, 101, mib - 64, mib, mib + 1, mib, 4, 4, 2 * mib, 0, 0, 7]
        for m, size in enumerate(sizes):
            pair[0].send(f(m), (torch.full((size,), m, dtype=torch.uint8),))
        for m, size in enumerate(sizes):
            (found,) = pair[1].recv(f(m), WAIT_S)
            assert found is not None
            assert torch.equal(found, torch.full((size,), m, dtype=torch.uint8)), (m, size)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_one_gib(self, pair: Pair) -> None:
        x = torch.arange(1 << 27, dtype=torch.int64)
        pair[0].send(f(0), (x,))
        (got,) = pair[1].recv(f(0), 240.0)
        assert got is not None
        assert torch.equal(got, x)

    def test_messages_of_an_older_generation_are_dropped(self, pair: Pair) -> None:
        end, current = cast("Any", pair[0]), cast("Any", pair[0]).form
        end.form = current._replace(generation=current.generation - 1)
        end.send(f(0), (torch.ones(2),))
        with pytest.raises(LinkError, match="did not come"):
            pair[1].recv(f(0), 0.2)
        end.form = current
        end.send(f(0), (torch.full((2,), 5.0),))
        assert pair[1].recv(f(0), WAIT_S)[0].tolist() == [5.0, 5.0]  # type: ignore[union-attr]

    def test_a_newer_generation_is_an_error_on_both_sides(self, pair: Pair) -> None:
        end = cast("Any", pair[0])
        generation = end.form.generation
        end.form = end.form._replace(generation=generation + 1)
        wait = Failing(partial(pair[1].recv, f(0), WAIT_S))
        end.send(f(0), (torch.ones(2),))
        assert re.search(rf"generation {generation + 1}.*generation {generation}", str(wait.result()))
        wait_until(lambda: refused(pair[0], f(1)) is not None)
        wait_until(lambda: refused(pair[1], b(1)) is not None)
