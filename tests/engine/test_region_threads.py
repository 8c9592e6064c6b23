"""Generated source is compiled in several threads at once, as the stages of a local run do."""

from __future__ import annotations

import gc
import sys
import threading
import time

import torch

from raypipe.engine.region import compiled

SOURCE = "def forward(self, x):\n" + "".join(
    f"    x = torch.ops.aten.add.Tensor(torch.ops.aten.mul.Tensor(x, {i}.0), torch.ops.aten.neg.default(x))\n"
    for i in range(60)
)
THREADS, TIMES = 8, 6


def test_threads_compile_at_once() -> None:
    """CPython 3.11 fails with "AST constructor recursion depth mismatch" where two make syntax trees."""
    failed: list[BaseException] = []
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()

    def work() -> None:
        try:
            for _ in range(TIMES):
                compiled(SOURCE + "    return x\n", {}, "stage", direct=True)(None, torch.ones(2))
        except BaseException as error:  # noqa: BLE001  (told by the test)
            failed.append(error)

    def turn(phase: str, told: dict[str, int]) -> None:
        """The collector runs in the middle of making a tree, and here other threads do."""
        time.sleep(0)

    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    gc.callbacks.append(turn)
    try:
        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        gc.callbacks.remove(turn)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval_s)
    assert failed == []
    assert not any(thread.is_alive() for thread in threads)
