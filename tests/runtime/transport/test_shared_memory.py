"""Channels whose large payloads go through shared memory: the contract, leases of slots, and what ends leave behind.

Needs no Ray.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import LinkError
from raypipe.runtime.transport import make_endpoint, shared_memory
from raypipe.runtime.transport.shared_memory import SLOTS, SendSegment, SharedMemoryChannel
from tests.contract.channel import WAIT_S, ChannelContract, Pair, b, f
from tests.runtime.transport.ends import HOST, open_link, opening, use_and_close
from tests.waiting import wait_until

LARGE = torch.arange(1 << 18, dtype=torch.float32)
"""A tensor that goes through a segment, whatever the threshold."""


@pytest.fixture
def everything_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send payloads of all sizes through segments."""
    monkeypatch.setattr(shared_memory, "SHARED_BYTES", 1)


class TestSharedMemoryChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, channel=SharedMemoryChannel)


@pytest.mark.usefixtures("everything_shared")
class TestEveryPayloadShared(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, channel=SharedMemoryChannel, checksum="on")


class TestSharedMemoryChannelOverTcp(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, kind="tcp", channel=SharedMemoryChannel)


def slots_in_use(end: Any) -> int:
    """Count the slots of the segment to which ``end`` sends that are on their way or leased."""
    return sum(end._slots_out._memory[1 : SLOTS + 1])


def segments() -> int:
    """Count the segments, mapped or open, of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:raypipe-link")
    files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return maps + sum("memfd:raypipe-link" in str(file) for file in files)


def is_seen(end: Any) -> bool:
    """Return True if the receiver has mapped the segment to which ``end`` sends."""
    return bool(end._slots_out._memory[0])


def seen(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Wait until both receivers have mapped the segments of their senders."""
    for end in pair:
        wait_until(partial(is_seen, end))
    return pair


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    ends = seen(open_link(channel=SharedMemoryChannel))
    yield ends
    for end in ends:
        end.close()


def test_a_slot_is_leased_until_the_last_view_or_graph_is_gone(pair: tuple[Any, Any]) -> None:
    a, z = pair
    a.send(f(0), (LARGE.clone().requires_grad_(), LARGE))
    first, second = z.recv(f(0), WAIT_S)
    assert slots_in_use(a) == 1
    graph, view = (first * first).sum(), second[5:7]
    del first, second
    gc.collect()
    assert slots_in_use(a) == 1
    del view
    assert slots_in_use(a) == 1
    graph.backward()
    del graph
    wait_until(lambda: slots_in_use(a) == 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_receiver_frees_no_slot(pair: tuple[Any, Any]) -> None:
    """Such as a worker of a DataLoader, which inherits tensors and frees its copies of them."""
    a, z = pair
    a.send(f(0), (LARGE,))
    held = [z.recv(f(0), WAIT_S)]
    if (child := os.fork()) == 0:
        held.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert slots_in_use(a) == 1
    held.clear()
    wait_until(lambda: slots_in_use(a) == 0)


def test_more_messages_than_slots_arrive(pair: tuple[Any, Any]) -> None:
    a, z = pair
    held = []
    for m in range(SLOTS + 5):
        a.send(f(m), (LARGE + m,))
        held += z.recv(f(m), WAIT_S)
        assert slots_in_use(a) == min(m + 1, SLOTS)
    assert all(torch.equal(x, LARGE + m) for m, x in enumerate(held))


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[Any, Any]]:
    """A link for all examples of a property."""
    ends = seen(open_link(channel=SharedMemoryChannel))
    yield ends
    for end in ends:
        end.close()


Step = tuple[int, int, bool]
"""Sender, elements of its message, and whether the oldest message that is held is freed first."""
STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from((9, 65_535, 65_536, 90_000)), st.booleans()), max_size=30)


@pytest.mark.slow
@given(STEPS)
def test_what_is_held_keeps_its_bits_whatever_comes(lasting: tuple[Any, Any], steps: list[Step]) -> None:
    """Messages both ways, of sizes on both sides of the threshold."""
    held: list[tuple[int, torch.Tensor]] = []
    for m, (sender, elements, frees) in enumerate(steps):
        del held[: int(frees)]
        action = f(m) if sender == 0 else b(m)
        lasting[sender].send(action, (torch.full((elements,), m),))
        (got,) = lasting[1 - sender].recv(action, WAIT_S)
        held.append((m, got))
        assert all(bool((x == number).all()) for number, x in held)
        del got
    held.clear()
    wait_until(lambda: slots_in_use(lasting[0]) + slots_in_use(lasting[1]) == 0)


def test_large_payloads_beyond_the_kept_slots_return_their_memory(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "REUSE_BYTES", LARGE.nbytes)
    a, z = pair
    held = []
    for m in range(4):
        a.send(f(m), (LARGE,))
        held.append(z.recv(f(m), WAIT_S))
    held.clear()
    wait_until(lambda: slots_in_use(a) == 0)
    assert [bool(slot[: LARGE.nbytes].any()) for slot in a._slots_out._slots[:4]] == [True, True, False, False]


# Without a segment.


def no_segment(*_: object) -> int:
    raise OSError("not permitted")


def test_without_a_segment_the_payload_follows_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a sandbox that knows no memfd."""
    monkeypatch.setattr(os, "memfd_create", no_segment)
    a, z = open_link(channel=SharedMemoryChannel)
    assert (a._slots_out, z._slots_out) == (None, None)
    a.send(f(0), (LARGE,))
    assert torch.equal(z.recv(f(0), WAIT_S)[0], LARGE)
    use_and_close([(a, z)])


def test_a_segment_that_the_receiver_cannot_map_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as if descriptors do not pass between two containers, or a limit of address space is reached."""
    monkeypatch.setattr(socket, "recv_fds", lambda sock, *_: (sock.recv(1), [], 0, None))
    a, z = open_link(channel=SharedMemoryChannel)
    for m in range(3):
        a.send(f(m), (LARGE,))
        assert torch.equal(z.recv(f(m), WAIT_S)[0], LARGE)
    assert bytes(a._slots_out._memory[: SLOTS + 1]) == bytes(SLOTS + 1)
    use_and_close([(a, z)])


@pytest.mark.parametrize("slot", [SLOTS + 1, 255])
def test_a_slot_that_does_not_exist_ends_the_link(pair: tuple[Any, Any], slot: int) -> None:
    a, z = pair
    a._slots_out.put = lambda _: slot
    a.send(f(0), (LARGE,))
    with pytest.raises(LinkError, match=f"slot {slot} of a segment"):
        z.recv(f(0), WAIT_S)


def test_auto_shares_memory_and_tcp_does_not() -> None:
    for transport, shares in (("auto", True), ("tcp", False)):
        ends = [make_endpoint(transport, HOST) for _ in range(2)]
        channels: list[Any] = [None, None]

        def enter(me: int, ends: list[Any] = ends, channels: list[Any] = channels) -> None:
            channels[me] = ends[me].open(opening(me, {1 - me: ends[1 - me].address}))[1 - me]

        threads = [threading.Thread(target=enter, args=(me,)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert [isinstance(channel, SharedMemoryChannel) for channel in channels] == [shares, shares]
        use_and_close([tuple(channels)])
        for end in ends:
            end.close()


# What remains.


def test_segments_are_gone_after_close_and_the_last_lease() -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()
    before, files, threads = segments(), len(list(descriptors.iterdir())), threading.active_count()
    links = [seen(open_link(channel=SharedMemoryChannel)) for _ in range(3)]
    a, z = links[0]
    a.send(f(5), (LARGE,))
    (held,) = z.recv(f(5), WAIT_S)
    use_and_close(links)
    assert torch.equal(held, LARGE), "a lease outlives its channel"
    del held, links, a, z
    wait_until(lambda: segments() == before)
    wait_until(lambda: len(list(descriptors.iterdir())) <= files)
    wait_until(lambda: threading.active_count() <= threads)


PEER = """
import os, sys, torch
from raypipe.runtime.transport.listener import Address
from raypipe.runtime.transport import make_endpoint
from tests.contract.channel import WAIT_S, b, f
from tests.runtime.transport.ends import HOST, opening
end = make_endpoint("auto", HOST)
print(*end.address, sep="|", flush=True)
host, port, unix, machine = sys.stdin.readline().rstrip("\\n").split("|")
link = end.open(opening(1, {0: Address(host, int(port), unix, machine)}))[0]
held = link.recv(f(0), WAIT_S)
link.send(b(0), (held[0] * 2,))
link.recv(f(1), WAIT_S)
"""


@pytest.mark.slow
def test_a_killed_peer_is_noticed_what_it_sent_stays_and_nothing_is_left() -> None:
    gc.collect()
    before, names = segments(), set(Path("/dev/shm").iterdir())
    root = Path(__file__).parents[3]
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    end = make_endpoint("auto", HOST)
    try:
        assert peer.stdin is not None
        assert peer.stdout is not None
        print(*end.address, sep="|", file=peer.stdin, flush=True)
        host, port, unix, machine = peer.stdout.readline().rstrip("\n").split("|")
        link: Any = end.open(opening(0, {1: (host, int(port), unix, machine)}))[1]
        wait_until(partial(is_seen, link))
        link.send(f(0), (LARGE,))
        (doubled,) = link.recv(b(0), WAIT_S)
        assert slots_in_use(link) == 1, "leased by the peer"
        peer.send_signal(signal.SIGKILL)
        with pytest.raises(LinkError, match="closed the link or died"):
            link.recv(b(1), WAIT_S)
        assert torch.equal(doubled, LARGE * 2), "shared memory outlives who wrote it"
        link.close()
        del link, doubled
        wait_until(lambda: segments() == before)
        assert [path for path in set(Path("/dev/shm").iterdir()) - names if "raypipe" in path.name] == []
    finally:
        peer.kill()
        peer.wait(WAIT_S)
        end.close()


def test_a_segment_takes_no_memory_before_its_first_use() -> None:
    near, far = socket.socketpair()
    with near, far:
        made = SendSegment.offer(near)
        assert made is not None
        _, descriptors, _, _ = socket.recv_fds(far, 1, 1)
        (descriptor,) = descriptors
        try:
            assert os.fstat(descriptor).st_blocks == 0
            assert os.fstat(descriptor).st_size == SLOTS * shared_memory.SLOT_BYTES + mmap.PAGESIZE
        finally:
            os.close(descriptor)
