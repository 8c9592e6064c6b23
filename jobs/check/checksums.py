"""What checksums cost: XXH3 alone, and messages between two processes over TCP, checked and unchecked in turns.

    python jobs/check/checksums.py --rounds 5

Wall and processor time per message, medians over rounds; both processes run on this machine, so that on a busy one the
processor time says more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import torch

from jobs.lib.machine import machine_line
from raypipe.engine.messages import checked_frame
from raypipe.ir.action import Action, Op
from raypipe.runtime.links.endpoint import Opening
from raypipe.runtime.links.tcp import SocketChannel, SocketListener, open_links

HOST, WAIT_S = "127.0.0.1", 120.0
SIZES = {256 << 10: 400, 16 << 20: 24}
"""Bytes of a message, and how many are sent in a round."""


def opened(me: int, pipe: Connection, checksum: str) -> SocketChannel:
    """This process's end of a TCP link to the process at the other end of the pipe."""
    with SocketListener(HOST, unix=False) as listener:
        pipe.send(tuple(listener.address))
        peer = 1 - me
        opening = Opening(me, {peer: pipe.recv()}, 0, "run", {peer: 1}, WAIT_S, {peer: "the link"}, checksum=checksum)
        return open_links(listener, opening)[peer]


def receive(pipe: Connection) -> None:
    """The other process: takes messages, and says what each cost it."""
    torch.set_num_threads(1)
    while (asked := pipe.recv()) is not None:
        checksum, count = asked
        channel = opened(1, pipe, checksum)
        channel.recv(Action(0, Op.SEND_F, 0), WAIT_S)
        begin_s = time.process_time()
        for number in range(1, count + 1):
            channel.recv(Action(0, Op.SEND_F, number), WAIT_S)
        channel.send(Action(1, Op.SEND_B, 0), [torch.zeros(1)])
        pipe.send((time.process_time() - begin_s) / count)
        channel.close()


def round_of(pipe: Connection, checksum: str, nbytes: int, count: int) -> tuple[float, float]:
    """(wall, processor) seconds per message, of both processes together."""
    pipe.send((checksum, count))
    channel = opened(0, pipe, checksum)
    x = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    channel.send(Action(0, Op.SEND_F, 0), [x])
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    for number in range(1, count + 1):
        channel.send(Action(0, Op.SEND_F, number), [x])
    channel.recv(Action(1, Op.SEND_B, 0), WAIT_S)
    wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
    theirs_s = pipe.recv()
    channel.close()
    return wall_s / count, cpu_s / count + theirs_s


def alone(nbytes: int, rounds: int) -> list[float]:
    """Bytes per second of XXH3 over memory of this size, in each round."""
    data = memoryview(torch.randint(0, 255, (nbytes,), dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    count, rates = max(8, (256 << 20) // nbytes), []
    for _ in range(rounds):
        begin_s = time.process_time()
        for _ in range(count):
            checked_frame.checksum([data])
        rates.append(count * nbytes / (time.process_time() - begin_s))
    return rates


def main() -> int:
    """Measure, and print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine_line(), flush=True)
    pipe, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    peer.start()
    figures: dict[str, Any] = {}
    for nbytes, count in SIZES.items():
        found: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        for _ in range(rounds):
            for checksum, times in found.items():
                times.append(round_of(pipe, checksum, nbytes, count))
        rates = alone(nbytes, rounds)
        medians = {
            name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in found.items()
        }
        (off_s, off_cpu_s), (on_s, on_cpu_s) = medians["off"], medians["on"]
        print(
            f"{nbytes >> 10:6d} KiB: XXH3 {statistics.median(rates) / 1e9:.1f} GB/s (best {max(rates) / 1e9:.1f}); "
            f"per message {off_s * 1e3:.2f} -> {on_s * 1e3:.2f} ms, "
            f"{nbytes / off_s / 1e9:.2f} -> {nbytes / on_s / 1e9:.2f} GB/s, "
            f"processor {off_cpu_s * 1e3:.2f} -> {on_cpu_s * 1e3:.2f} ms",
            flush=True,
        )
        figures[str(nbytes)] = {"xxh3_bytes_s": rates, **found}
    pipe.send(None)
    peer.join(WAIT_S)
    print(json.dumps({"check": "checksums", "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
