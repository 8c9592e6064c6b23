"""A process that computes as a stage does, for crowd.py; a script of its own, so that numpy is all it has to load.

stdin   b"1" compute, b"0" rest, b"\\n" between    end of file: end, whatever became of who started it
stdout  one line when it can begin
"""

import itertools
import os
import sys
import threading

import numpy as np

WIDTH = 384
MATRICES = 8
STREAMED = 1 << 20
"""Numbers in an array that is read and written beside the products, as activations and gradients are."""


def main() -> None:
    """Compute until the input ends."""
    allowed = threading.Event()
    matrices = np.full((MATRICES, WIDTH, WIDTH), 1e-3, np.float32)
    product = np.empty((WIDTH, WIDTH), np.float32)
    source, target = np.zeros(STREAMED, np.float32), np.zeros(STREAMED, np.float32)
    threading.Thread(target=_listen, args=(allowed,), daemon=True).start()
    os.write(1, b"ready\n")
    for matrix in itertools.cycle(matrices):
        allowed.wait()
        np.matmul(matrices[0], matrix, out=product)
        if matrix is matrices[-1]:
            np.add(source, 1.0, out=target)


def _listen(allowed: threading.Event) -> None:
    while word := sys.stdin.buffer.readline():
        (allowed.set if word.strip() == b"1" else allowed.clear)()
    os._exit(0)


if __name__ == "__main__":
    main()
