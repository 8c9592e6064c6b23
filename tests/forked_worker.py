"""Ray workers that are forked from a process which has imported torch, instead of each importing it anew.

    raylet --starts--> this file, in place of Ray's setup_worker.py --socket--> server --forks--> default_worker.py

An import of torch costs 2 s of CPU time, and a test of a run starts four workers. The server does not import Ray, whose
core keeps the environment that it was loaded with. A worker with a runtime environment is started by Ray's own script.
``pytest --forked-workers`` uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator

__all__ = ["forked_workers"]

SOCKET = "RAYPIPE_TESTS_SERVER"
"""Variable of the environment of raylets: path of the server's socket."""


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Let nodes that are started inside fork their workers, with one thread of torch, Ray's default."""
    import subprocess
    import tempfile
    from pathlib import Path

    from ray._private import ray_constants

    own = ray_constants.SETUP_WORKER_FILENAME
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        path = f"{folder}/socket"
        root = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        command = [sys.executable, __file__, "--serve", path]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            os.environ[SOCKET] = path
            ray_constants.SETUP_WORKER_FILENAME = __file__
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = own
            os.environ.pop(SOCKET, None)
            server.kill()
            server.wait()
            server.stdout.close()


def _serve(path: str) -> None:
    """Import what workers import, then fork one for each connection; returns only in a worker, ready to run."""
    import signal

    import jsonschema  # noqa: F401  Ray imports these
    import numpy as np
    import requests  # noqa: F401
    import torch  # noqa: F401
    import yaml  # noqa: F401

    import raypipe.engine.executor
    import raypipe.run.loop  # noqa: F401

    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        print("ready", flush=True)
        while True:
            link, _ = server.accept()
            with link:
                size, streams, _, _ = socket.recv_fds(link, 8, 3)
                body = link.makefile("rb").read(int.from_bytes(size, "big"))
                if os.fork() == 0:
                    break
                link.sendall(b"x")
                for stream in streams:
                    os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ray ends the process group of a worker
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    sys.argv, environment, folder = json.loads(body)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    np.random.seed()


def _reap(*_: object) -> None:
    """Wait for the workers that have ended: as zombies they would pass for alive."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _request(path: str, arguments: list[str]) -> None:
    """Have the server fork a worker with this process's environment, folder and standard streams."""
    body = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        socket.send_fds(link, [len(body).to_bytes(8, "big")], [0, 1, 2])
        link.sendall(body)
        link.recv(1)


def _start(arguments: list[str]) -> None:
    """Start the worker that raylet has asked for."""
    context = [word for word in arguments if word.startswith("--serialized-runtime-env-context=")]
    if any(value for word in context for value in json.loads(word.partition("=")[2] or "{}").values()):
        from ray._private import workers

        os.execv(sys.executable, [sys.executable, f"{workers.__path__[0]}/setup_worker.py", *arguments])
    own = [word for word in arguments if word not in context and not word.startswith("--language=")]
    _request(os.environ[SOCKET], own)


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        _start(sys.argv[1:])
    else:
        _serve(sys.argv[2])
        import runpy

        sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
        runpy.run_path(sys.argv[0], run_name="__main__")
