"""Links through the object store: the contract with both ends in one actor, and two actors where it takes two."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.transport.endpoint import LinkSetup
from raypipe.runtime.transport.object_store import ControlMessage, ObjectStoreEndpoint, packed_link, unpacked_link
from raypipe.runtime.worker import worker
from tests.contract.channel import WAIT_S, WAKE_S, ChannelContract, Pair, b, f
from tests.runtime.transport.ends import opening
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STORE_BYTES = 1536 << 20
GROUPS = {**worker.GROUPS, "waiting": 2}


def own_threads() -> int:
    """Threads that links have started here. Ray's own, one per member of a concurrency group, come on first use."""
    return sum(thread.name.startswith("raypipe-") for thread in threading.enumerate())


class _BothEnds(ChannelContract):
    """Runs the contract inside an actor, so that it sees the tensors themselves: real calls, of an actor to itself.

    Messages carry checksums, though nothing leaves the host; ``left`` counts those until one is damaged; none below 0.
    """

    def __init__(self) -> None:
        self.left = -1
        self.counting = threading.Lock()
        self.rng = random.Random(0)
        self.ends: dict[int, ObjectStoreEndpoint] = {}
        self.generations = count(3)

    def open_pair(self, max_tensors: int = 4) -> Pair:
        first, second = ObjectStoreEndpoint(), ObjectStoreEndpoint()
        self.ends, generation = {0: first, 1: second}, next(self.generations)
        with ThreadPoolExecutor(2) as pool:
            me = first.address
            a = pool.submit(first.open, opening(0, {1: me}, generation, max_tensors, checksum="on"))
            z = pool.submit(second.open, opening(1, {0: me}, generation, max_tensors, checksum="on"))
            return a.result()[1], z.result()[0]

    def check(self, name: str, values: dict[str, Any]) -> int:
        pair = self.open_pair()
        try:
            getattr(self, name)(pair=pair, **values)
        finally:
            for end in pair:
                end.close()
        return own_threads()

    @ray.method(concurrency_group="links", num_returns=0)
    def link_message(self, link: bytes, *pieces: object) -> None:
        self._message(link, *pieces)

    @ray.method(concurrency_group="links")
    def link_message_acked(self, link: bytes, *pieces: object) -> str:
        return self._message(link, *pieces)

    def _message(self, link: bytes, *pieces: object) -> str:
        found = unpacked_link(link)
        assert found is not None
        return self.ends[found[0].receiver].message(link, *self._damage(pieces))

    def _damage(self, pieces: Any) -> list[Any]:
        with self.counting:  # calls come in two threads, in any order
            self.left -= 1
            if self.left != -1:
                return list(pieces)
        arrays = [np.frombuffer(piece, np.uint8).copy() for piece in pieces]
        hit = arrays[self.rng.randrange(len(arrays))]
        hit[self.rng.randrange(hit.size)] ^= 1 << self.rng.randrange(8)
        return [
            array if isinstance(piece, np.ndarray) else array.tobytes()
            for piece, array in zip(pieces, arrays, strict=True)
        ]

    def damage(self, seed: int, elements: int) -> str:
        """Send two messages, of which the second one arrives damaged: why it is not accepted."""
        a, z = self.open_pair()
        self.rng, self.left = random.Random(seed), 1
        try:
            for m in range(2):
                a.send(f(m), (torch.full((elements,), float(m)),))
            for m in range(2):
                z.recv(f(m), WAIT_S)
        except LinkError as error:
            return str(error)
        finally:
            z.close()
            a.close()
            self.left = -1
        return ""

    @ray.method(concurrency_group="notices")
    def link_notify(self, letter: ControlMessage) -> str:
        return self.ends[letter.link.receiver].notify(letter)

    @ray.method(concurrency_group="watch")
    def link_watch(self, link: Any) -> None:
        self.ends[link.receiver].watch(link)


class _End(worker._StageActor):
    """One end of a link, for a test that holds the other end's actor too."""

    channel: Any = None
    _endpoint: Any

    def listen(self) -> tuple[Any, int]:
        if self.channel is not None:
            self.channel.close()
        self._endpoint = ObjectStoreEndpoint()
        return self._endpoint.address, os.getpid()

    def open(self, order: LinkSetup) -> int:
        """Open the link; how many threads it has."""
        (self.channel,) = self._endpoint.open(order).values()
        return own_threads()

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.channel, name)(*arguments)

    def close(self) -> int:
        self.channel.close()
        return own_threads()

    def goodbye(self, letter: ControlMessage) -> str:
        return self._endpoint.notify(letter)

    def message(self, *pieces: object) -> str:
        return self._endpoint.message(packed_link(self.channel.link._replace(sender=0, receiver=1)), *pieces)

    def link(self) -> Any:
        return self.channel.link

    def send_many(self, count: int, nbytes: int) -> None:
        for m in range(count):
            self.channel.send(f(m), (torch.full((nbytes // 4,), float(m)),))

    def take_many(self, count: int) -> list[float]:
        return [float(self.channel.recv(f(m), 60.0)[0][-1]) for m in range(count)]

    @ray.method(concurrency_group="waiting")
    def fail_at(self, action: Any) -> tuple[str, str, float]:
        """How and when a wait for a message ended that never comes."""
        try:
            self.channel.recv(action, WAIT_S)
        except LinkError as error:
            return type(error).__name__, str(error), time.monotonic()
        raise AssertionError("it came")


BothEnds = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(_BothEnds)
End = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(_End)


@pytest.fixture(scope="module")
def both(local_ray: None) -> Iterator[Any]:
    actor = BothEnds.remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def actors(local_ray: None) -> Iterator[list[Any]]:
    """Two processes for all tests below; the last of them kills one."""
    made = [End.remote(), End.remote()]
    yield made
    for actor in made:
        ray.kill(actor)


Ends = tuple[list[Any], list[Any], list[int]]


@pytest.fixture
def ends(actors: list[Any]) -> Ends:
    """Two actors that listen anew, with their addresses and process ids."""
    known = get(*(actor.listen.remote() for actor in actors))
    return actors, [address for address, _ in known], [pid for _, pid in known]


@pytest.fixture
def linked(ends: Ends) -> tuple[Any, Any, list[int]]:
    (first, second), addresses, pids = ends
    gained = get(first.open.remote(opening(0, {1: addresses[1]})), second.open.remote(opening(1, {0: addresses[0]})))
    assert gained == [1, 1], "one waiting thread at each end"
    return first, second, pids


def get(*refs: Any) -> list[Any]:
    return ray.get(list(refs), timeout=240)


def contract() -> Iterator[Any]:
    """Every test of the contract, with the values that pytest would give it."""
    for name in dir(ChannelContract):
        if name.startswith("test_"):
            marks = [m for m in getattr(getattr(ChannelContract, name), "pytestmark", ()) if m.name == "parametrize"]
            argument, values = marks[0].args if marks else ("", [None])
            for value in values:
                given = {argument: value} if marks else {}
                yield pytest.param(name, given, id="-".join([name.removeprefix("test_"), *map(str, given.values())]))


def store_bytes() -> int:
    """Bytes of the object store that are in use, as the node tells."""
    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return int(stats.object_store_bytes_used)


@pytest.mark.parametrize(("name", "values"), list(contract()))
def test_contract(both: Any, name: str, values: dict[str, Any]) -> None:
    get(both.check.remote(name, values))


def test_links_leave_no_thread_behind(both: Any) -> None:
    assert get(*(both.check.remote("test_a_message_may_hold_nothing", {}) for _ in range(5))) == [0] * 5


def test_each_of_30_damaged_messages_is_noticed_and_none_is_accepted(both: Any) -> None:
    """Bytes in the call and arrays of the store."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    said = get(*(both.damage.remote(seed + i, (5, 50_000, 400_000)[i % 3]) for i in range(30)))
    assert [one for one in said if "arrived damaged: its " not in one or "max_failures" not in one] == []
    assert any("0SEND_F1 (micro-batch 1) arrived damaged: its payload" in one for one in said)


def test_an_abort_is_felt_in_the_other_process(linked: tuple[Any, Any, list[int]]) -> None:
    first, second, _ = linked
    waits = [first.fail_at.remote(b(0)), second.fail_at.remote(f(0))]
    time.sleep(0.2)
    start_s = time.monotonic()
    get(first.call.remote("abort", "stage 7 died"))
    for kind, text, ended_s in get(*waits):
        print(f"woke after {(ended_s - start_s) * 1e3:.1f} ms")
        assert kind == LinkAbortedError.__name__
        assert "stage 7 died" in text
        assert ended_s - start_s < WAKE_S
    assert get(first.close.remote(), second.close.remote()) == [0, 0]


def test_the_store_does_not_grow(linked: tuple[Any, Any, list[int]]) -> None:
    """Twice its size goes through; what was taken is gone when Ray's next batches of deletions are done."""
    first, second, _ = linked
    before = store_bytes()
    count, nbytes = 96, 32 << 20
    took = second.take_many.remote(count)
    get(first.send_many.remote(count, nbytes))
    assert get(took) == [[float(m) for m in range(count)]]
    wait_until(lambda: store_bytes() <= before + (1 << 20))


@pytest.mark.parametrize(
    "pieces",
    [(), (b"short",), (bytes(4096),), (b"x" * 400, 7)],
    ids=["nothing", "short", "zeros", "mixed"],
)
def test_what_is_no_message_ends_the_link(linked: tuple[Any, Any, list[int]], pieces: tuple[Any, ...]) -> None:
    first, second, _ = linked
    waits = [first.fail_at.remote(b(0)), second.fail_at.remote(f(0))]
    assert get(second.message.remote(*pieces)) == ["taken"]
    for kind, text, _ in get(*waits):
        print(text)
        assert kind in (LinkError.__name__, LinkAbortedError.__name__)
        assert "not a message" in text or "Not a raypipe frame" in text
    assert get(first.close.remote(), second.close.remote()) == [0, 0]


def test_a_message_for_no_link_is_not_taken() -> None:
    for link in (b"", b"x" * 35, bytes(36), "text", None):
        assert ObjectStoreEndpoint().message(link, b"x") == "gone"


def test_a_letter_of_another_generation_is_not_taken(ends: Ends) -> None:
    (first, second), addresses, _ = ends
    get(first.open.remote(opening(0, {1: addresses[1]})), second.open.remote(opening(1, {0: addresses[0]})))
    old = get(first.link.remote())[0]
    get(first.close.remote(), second.close.remote())
    get(first.open.remote(opening(0, {1: addresses[1]}, 4)), second.open.remote(opening(1, {0: addresses[0]}, 4)))
    assert get(second.goodbye.remote(ControlMessage("goodbye", old, "late", 0))) == ["gone"]
    get(first.call.remote("send", f(0), (torch.ones(2),)))
    assert get(second.call.remote("recv", f(0), WAIT_S))[0][0].tolist() == [1.0, 1.0]


def test_an_opening_that_is_obsolete_ends(ends: Ends) -> None:
    (first, second), addresses, _ = ends
    newer = second.open.remote(opening(1, {0: addresses[0]}, 4))
    with pytest.raises(LinkError, match=r"generation 3 while worker 1 has generation 4.*obsolete"):
        get(first.open.remote(opening(0, {1: addresses[1]}, 3)))
    get(first.open.remote(opening(0, {1: addresses[1]}, 4)), newer)


def test_another_plan_is_an_error_on_both_sides(ends: Ends) -> None:
    (first, second), addresses, _ = ends
    both = [
        first.open.remote(opening(0, {1: addresses[1]}, capacity=4)),
        second.open.remote(opening(1, {0: addresses[0]}, capacity=5)),
    ]
    for ref in both:
        with pytest.raises(LinkError, match=r"up to \d tensors.*the same plan"):
            get(ref)


def test_an_absent_peer_is_named(ends: Ends) -> None:
    (first, _), addresses, _ = ends
    with pytest.raises(LinkError, match=r"0.1 s: no welcome from worker 1"):
        get(first.open.remote(opening(0, {1: addresses[1]}, timeout_s=0.1)))


def test_a_killed_peer_is_noticed_by_who_only_waits(linked: tuple[Any, Any, list[int]], ends: Ends) -> None:
    first, second, pids = linked
    get(first.send_many.remote(2, 1 << 20))
    assert get(second.take_many.remote(2)) == [[0.0, 1.0]]
    wait = second.fail_at.remote(f(9))
    time.sleep(0.2)
    start_s = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    kind, text, ended_s = get(wait)[0]
    print(f"SIGKILL noticed after {(ended_s - start_s) * 1e3:.1f} ms: {text}")
    assert ended_s - start_s < WAKE_S
    assert kind == LinkError.__name__
    assert "stage 1 <-> stage 0: the peer died" in text
    assert "0SEND_F9" in text
    with pytest.raises(LinkError, match="the peer died"):
        get(second.call.remote("send", b(0), ()))
    with pytest.raises(LinkError, match="cannot reach worker 0"):
        get(second.open.remote(opening(1, {0: ends[1][0]}, 4)))
