"""Strangers at the ports of two workers, while these open their links again and again. Needs no Ray."""

from __future__ import annotations

import random
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from jobs.lib.strangers import KINDS, Strangers
from raypipe.runtime.links import tcp as sockets
from raypipe.runtime.links.handshake import Hello, call, run_digest
from raypipe.runtime.links.tcp import SocketListener
from tests.contract.channel import WAIT_S, Failing, b, f, wait_until
from tests.runtime.links.ends import HOST, close, open_channels, together

SECRET = b"secret"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_links_open_and_carry_messages_through_2000_strangers() -> None:
    """They come faster than they can be sent away, also while nobody opens a link and the listeners' queues fill."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    before = descriptors()
    with SocketListener(HOST, unix=False) as first, SocketListener(HOST, unix=False) as second:
        ports = [each.address[:2] for each in (first, second)]
        hellos = [Hello(run_digest("run"), g, me, 1 - me, 4) for g in range(8) for me in (0, 1)]
        strangers = Strangers(ports, hellos, SECRET, seed)
        over = threading.Event()

        def crowd() -> None:
            while sum(strangers.tried.values()) < 2000 or not over.is_set():
                strangers.visit(1)

        thread = threading.Thread(target=crowd, daemon=True)
        thread.start()
        most = 0
        for generation in range(6):
            begin_s = time.monotonic()
            known = (generation, "run", 4, WAIT_S)
            a, z = together(
                partial(open_channels, first, 0, {1: second.address}, *known, secret=SECRET),
                partial(open_channels, second, 1, {0: first.address}, *known, secret=SECRET),
            )
            print(f"generation {generation} opened after {time.monotonic() - begin_s:.3f} s")
            for m in range(20):
                a[1].send(f(m), (torch.full((100,), float(m)),))  # type: ignore[index]
                z[0].send(b(m), (torch.full((100,), float(m)),))  # type: ignore[index]
                assert z[0].recv(f(m), WAIT_S)[0][0].item() == m  # type: ignore[index]
                assert a[1].recv(b(m), WAIT_S)[0][0].item() == m  # type: ignore[index]
            most = max(most, descriptors())
            close(a, z)
        over.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        print(f"{dict(strangers.tried)}, of which {strangers.connected} connected; most descriptors {most - before}")
        assert set(strangers.tried) == set(KINDS)
        strangers.leave()
    wait_until(lambda: descriptors() <= before)


def test_who_greets_like_a_peer_is_not_sent_away_for_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is far away takes long to prove itself, and others connect meanwhile."""
    monkeypatch.setattr(sockets, "GUESTS", 8)
    with SocketListener(HOST, unix=False) as first, SocketListener(HOST, unix=False) as mute:
        opening = Failing(lambda: open_channels(first, 0, {1: mute.address}, 0, "run", 4, 1.0, secret=SECRET))
        far = socket.create_connection(first.address[:2], timeout=WAIT_S)
        conversation = call(Hello(run_digest("run"), 0, 1, 0, 4), SECRET)
        far.sendall(next(conversation).say)
        challenge = far.recv(16)
        silent = [socket.create_connection(first.address[:2], timeout=WAIT_S) for _ in range(40)]
        assert silent[0].recv(1) == b"", "the oldest silent one had to go"
        far.sendall(conversation.send(challenge).say)
        assert len(far.recv(32)) == 32, "a welcome"
        assert "no welcome from workers [1]" in str(opening.result())
        for sock in (far, *silent):
            sock.close()
