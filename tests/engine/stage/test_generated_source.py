"""Generated source calls operations directly, names the one that raises, and is compiled in threads at once."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback

import pytest
import torch

from raypipe.engine.stage.generated_source import compiled

SOURCE = """
def forward(self, x, y):
    added = torch.ops.aten.add.Tensor(x, y, alpha = 2)
    return (torch.ops.aten.mm.default(added, y), torch.ops.aten.sym_size.int(x, 1))
"""


@pytest.mark.parametrize("direct", [False, True])
def test_a_function_computes_what_its_source_says(*, direct: bool) -> None:
    function = compiled(SOURCE, {}, "part", direct=direct)
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    product, size = function(None, x, y)
    assert torch.equal(product, (x + 2 * y) @ y)
    assert size == 3


def test_a_traceback_shows_the_operation_as_it_was_captured() -> None:
    function = compiled(SOURCE, {}, "part", direct=True)
    with pytest.raises(RuntimeError) as caught:
        function(None, torch.randn(2, 3), torch.randn(2, 3))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.startswith("<part")
    assert "torch.ops.aten.mm.default(added, y)" in str(last.line)


LONG_SOURCE = "def forward(self, x):\n" + "".join(
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
                compiled(LONG_SOURCE + "    return x\n", {}, "stage", direct=True)(None, torch.ones(2))
        except BaseException as error:  # noqa: BLE001  (the test fails on it)
            failed.append(error)

    def turn(phase: str, info: dict[str, int]) -> None:
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
