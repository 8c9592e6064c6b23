"""What every device does behind engine/device/device.py; the CPU, the fake device and CUDA pass these tests.

A class of tests inherits them and has a fixture ``device``. On a device that computes later, ``busy`` keeps it so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from raypipe.engine.codec import Codec
from raypipe.engine.codec.codec import CodedTensor
from raypipe.engine.device.device import Device, StreamName, TransferKind
from raypipe.engine.messages import frame
from raypipe.engine.messages.frame import FrameFormat, wait_for_copies
from raypipe.engine.messages.transfer import KEPT, DeviceTransfer
from raypipe.ir.schedule import Action, Op

__all__ = ["DeviceContract"]

WHAT = TransferKind.INPUTS

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "gaps": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].contiguous().expand(-1, 5, -1, -1),
    "scalar": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def sample(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    """Reproducible values of any type, in host memory."""
    raw = torch.randn(*(shape or (2, 3, 4, 6)), generator=torch.Generator().manual_seed(7)) * 50
    return raw > 0 if dtype is torch.bool else raw.to(dtype)


def _sent(action: Action, tensor: torch.Tensor, codec: Codec) -> tuple[frame.Head, torch.Tensor]:
    """Header and payload of a message that a link has encoded."""
    made = frame.encode(action, (tensor,), FrameFormat(0, 1), codec=codec)
    return frame.parse(made.header, FrameFormat(0, 1)), frame.gather(made)


class DeviceContract:
    """Inherited by the tests of each device."""

    @pytest.fixture(autouse=True)
    def _prepared(self, device: Device) -> Iterator[None]:
        with device.prepare_thread():
            yield

    @pytest.fixture
    def crossing(self, device: Device) -> DeviceTransfer:
        return DeviceTransfer(device)

    def busy(self, device: Device) -> None:
        """Give the computing stream work that takes a while, where there is anything to be busy with."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_tensors_come_back_as_they_were(self, crossing: DeviceTransfer, layout: str) -> None:
        for dtype in DTYPES:
            x = LAYOUTS[layout](sample(dtype))
            if dtype.is_floating_point:
                x = x.detach().requires_grad_()
            there = crossing.to_device((x, None), WHAT)
            assert there[0] is not None
            assert there[0].device == crossing.device.place
            back, nothing = crossing.to_host(there, WHAT)
            assert nothing is None
            assert back is not None
            assert back.device.type == "cpu"
            assert (back.dtype, back.shape, back.requires_grad) == (x.dtype, x.shape, x.requires_grad)
            if layout != "gaps":  # what has gaps is packed
                assert back.stride() == x.stride()
            assert torch.equal(back, x)

    def test_what_is_computed_is_seen_on_the_host(self, device: Device, crossing: DeviceTransfer) -> None:
        x = sample()
        (there,) = crossing.to_device((x,), WHAT)
        assert there is not None
        self.busy(device)
        (back,) = crossing.to_host((there * 2 + 1,), WHAT)
        assert torch.equal(back, x * 2 + 1)  # type: ignore[arg-type]

    def test_the_host_may_change_what_it_gave(self, device: Device, crossing: DeviceTransfer) -> None:
        if device.immediate:
            pytest.skip("tensors are handed through")
        x = sample()
        kept = x.clone()
        self.busy(device)
        there = crossing.to_device((x,), WHAT)
        x.zero_()
        (back,) = crossing.to_host(there, WHAT)
        assert torch.equal(back, kept)  # type: ignore[arg-type]

    def test_staging_memory_comes_round_again(self, device: Device, crossing: DeviceTransfer) -> None:
        given = [sample(torch.float32, 1000) + i for i in range(3 * KEPT)]
        self.busy(device)
        there = [crossing.to_device((x,), WHAT)[0] for x in given]
        for x, back in zip(given, crossing.to_host(there, WHAT), strict=True):
            assert torch.equal(back, x)  # type: ignore[arg-type]

    def test_memory_is_not_given_away_while_another_stream_uses_it(
        self, device: Device, crossing: DeviceTransfer
    ) -> None:
        total = torch.zeros(4096)
        (there,) = crossing.to_device((total,), WHAT)
        for i in range(20):
            (x,) = crossing.to_device((torch.full((4096,), float(i)),), WHAT)
            self.busy(device)
            there = there + x  # type: ignore[operator]
            del x  # while the addition may not have begun
        (back,) = crossing.to_host((there,), WHAT)
        assert torch.equal(back, torch.full((4096,), float(sum(range(20)))))  # type: ignore[arg-type]

    def test_copies_belong_to_whoever_asked(self, device: Device, crossing: DeviceTransfer) -> None:
        there = crossing.named({"a": sample(), "b": sample(torch.int64)}, WHAT)
        copies = crossing.copied(there, TransferKind.SNAPSHOT)
        there["a"].add_(1)
        assert torch.equal(copies["a"], sample())
        assert torch.equal(copies["b"], sample(torch.int64))
        assert all(copy.device.type == "cpu" and not copy.requires_grad for copy in copies.values())

    def test_another_thread_may_copy(self, device: Device, crossing: DeviceTransfer) -> None:
        found: list[dict[str, torch.Tensor]] = []

        def copy() -> None:
            other = DeviceTransfer(device)
            found.append(other.copied(other.named({"a": sample()}, WHAT), TransferKind.SNAPSHOT))

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join(60)
        assert torch.equal(found[0]["a"], sample())

    @pytest.mark.parametrize("name", ["bf16", "int8"])
    def test_a_message_is_encoded_and_decoded_as_links_do_it(
        self, device: Device, crossing: DeviceTransfer, name: str
    ) -> None:
        if not device.codes:
            pytest.skip("links encode for it")
        x, action = sample(torch.float32, 3, 200).t().requires_grad_(), Action(0, Op.SEND_F, 1)
        (there,) = crossing.to_device((x,), WHAT)
        assert there is not None
        self.busy(device)
        codec = Codec(name, 5 if name == "int8" else None)
        message = crossing.outgoing(action, (there * 2,), WHAT, codec)
        wait_for_copies(message)
        (coded,) = message
        assert isinstance(coded, CodedTensor)
        (plain,) = frame.decode(*_sent(action, (x.detach() * 2).requires_grad_(), codec))
        (back,) = crossing.to_host(crossing.to_device((coded,), WHAT), WHAT)
        assert back is not None
        assert plain is not None
        assert torch.equal(back, plain)
        assert (back.stride(), back.requires_grad) == (plain.stride(), plain.requires_grad)

    @pytest.mark.parametrize("requires_grad", [False, True])
    @pytest.mark.parametrize("on_device", [False, True])
    def test_a_message_is_what_it_was_when_it_was_handed_over(
        self, device: Device, crossing: DeviceTransfer, *, requires_grad: bool, on_device: bool
    ) -> None:
        if device.immediate:
            pytest.skip("tensors are handed through")
        x = sample(torch.float32, 3, 200).t().requires_grad_(requires_grad)
        (there,) = crossing.to_device((x,), WHAT)
        assert there is not None
        action = Action(0, Op.SEND_F, 1)
        self.busy(device)
        message = crossing.outgoing(action, (there,), TransferKind.OUTPUTS, Codec(), on_device=on_device)
        if not requires_grad:  # a buffer, which the next forward changes
            there.add_(1)
        if on_device:
            message = crossing.copying(message, TransferKind.OUTPUTS)  # type: ignore[arg-type]
        wait_for_copies(message)
        (came,) = message
        assert isinstance(came, torch.Tensor)
        assert torch.equal(came, x)
        assert (came.stride(), came.requires_grad) == (x.stride(), requires_grad)

    def test_scalars_are_read(self, crossing: DeviceTransfer) -> None:
        there = crossing.to_device((torch.tensor(2.5), None, torch.tensor(float("nan"))), WHAT)
        values = crossing.read(there, TransferKind.LOSS)
        assert values[:2] == [2.5, None]
        assert values[2] is not None
        assert values[2] != values[2]

    def test_marks_are_reached_in_order_on_the_clock_of_the_host(
        self, device: Device, crossing: DeviceTransfer
    ) -> None:
        for _ in range(3):  # a device's clock is placed anew every time
            begin_s = time.monotonic()
            marks = []
            for _ in range(4):
                marks.append(device.mark())
                self.busy(device)
            marks.append(device.mark())
            found = device.seconds(marks)
            end_s = time.monotonic()
            assert found == sorted(found)
            assert begin_s - 1e-4 <= found[0] <= found[-1] <= end_s + 1e-4  # an event counts half microseconds

    def test_parts_of_a_backward_are_timed(self, device: Device, crossing: DeviceTransfer) -> None:
        assert crossing.two_parts_s(None) is None
        marks = device.mark(), device.mark(), device.mark()
        parts = crossing.two_parts_s(marks)
        assert parts is not None
        assert min(parts) >= 0

    def test_a_mark_that_was_waited_for_is_reached(self, device: Device) -> None:
        self.busy(device)
        mark = device.mark()
        device.finish(mark, "test: reached once it is waited for")
        assert device.reached(mark)

    def test_a_stream_may_be_waited_for(self, device: Device) -> None:
        with device.stream(StreamName.COPY_IN):
            x = device.empty(1000, torch.float32).fill_(3.0)
            filled = device.mark()
        device.wait(filled, "test: added once it is filled")
        device.record_stream(x)
        total = (x + 1).sum()
        summed = device.mark()
        with device.stream(StreamName.COPY_OUT):
            device.wait(summed, "test: copied once it is summed")
            device.record_stream(total)
            host = device.staging(4).view(torch.float32)
            host.copy_(total.view(1), non_blocking=True)
            copied = device.mark()
        device.finish(copied, "test: read once it is copied")
        assert host.tolist() == [4000.0]

    def test_recorded_work_is_repeated_on_the_same_memory(self, device: Device, crossing: DeviceTransfer) -> None:
        if not device.graphs:
            pytest.skip("it records no graphs")
        (x, total) = crossing.to_device((torch.ones(100), torch.zeros(100)), WHAT)
        assert x is not None
        assert total is not None

        def work() -> torch.Tensor:
            doubled = x * 2  # memory of the graph that nobody keeps
            total.add_(doubled)
            return doubled.sum()

        work()  # kernels are loaded
        replay, found = device.record(work, device.new_pool())
        for times in (2, 3):
            x.fill_(float(times))
            self.busy(device)
            replay()
            assert crossing.read((found,), WHAT) == [200.0 * times]
        (back,) = crossing.to_host((total,), WHAT)
        assert torch.equal(back, torch.full((100,), 2.0 + 4.0 + 6.0))  # type: ignore[arg-type]

    def test_a_recorded_draw_has_the_seed_of_its_generator_at_the_replay(
        self, device: Device, crossing: DeviceTransfer
    ) -> None:
        if not device.graphs:
            pytest.skip("it records no graphs")
        (x,) = crossing.to_device((torch.empty(1000),), WHAT)
        assert x is not None
        generators = [torch.Generator(device.place) for _ in range(2)]

        def drawn() -> torch.Tensor:
            return torch.empty_like(x).uniform_(generator=generators[0]) + x.bernoulli_(generator=generators[1])

        def seeded(first: int, second: int) -> None:
            generators[0].manual_seed(first)
            generators[1].manual_seed(second)

        eager = []
        for seeds in ((1, 2), (3, 4), (1, 4)):
            seeded(*seeds)
            eager.append(drawn())
        replay, found = device.record(drawn, device.new_pool(), generators)
        replayed = []
        for seeds in ((1, 2), (3, 4), (1, 4)):
            self.busy(device)
            seeded(*seeds)
            replay()
            replayed.append(found.clone())
        wanted, got = crossing.to_host(eager, WHAT), crossing.to_host(replayed, WHAT)
        assert all(map(torch.equal, got, wanted))  # type: ignore[arg-type]
        assert len({tuple(draw.tolist()) for draw in wanted}) == 3  # type: ignore[union-attr]

    def test_what_the_host_reads_is_not_recorded(self, device: Device, crossing: DeviceTransfer) -> None:
        if not device.graphs:
            pytest.skip("it records no graphs")
        (x,) = crossing.to_device((torch.ones(100),), WHAT)
        with pytest.raises(RuntimeError, match="captur"):
            device.record(lambda: x.sum().item(), device.new_pool())  # type: ignore[union-attr]

    def test_the_peak_counts_what_is_held(self, device: Device) -> None:
        held = device.empty(1 << 20, torch.float32)
        held.fill_(1.0)
        assert device.peak_bytes() >= held.nbytes

    def test_a_thread_that_computes_has_one_intra_op_thread(self, device: Device) -> None:
        assert torch.get_num_threads() == 1
