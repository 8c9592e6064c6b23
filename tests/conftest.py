"""For all tests: steady property tests, marks of tiers, their order, and no process left behind."""

from __future__ import annotations

import os
import resource
import secrets
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from tests import processes, tiers
from tests.shared_engine import captures_of_a_test, shared_captures, steady_engine  # noqa: F401
from tests.shared_ray import (  # noqa: F401
    cluster,
    fleet,
    head,
    local_ray,
    pytest_runtest_makereport,
    stays_connected,
)

_PATIENCE_S = 10.0

# The same examples on every run: a tier that passed passes again. No deadline: this may be a slow machine.
settings.register_profile("raypipe", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("raypipe")


class Watch:
    """Finder for ``sys.meta_path`` that finds nothing, and notes the first import of each of some modules.

    Attributes:
        importers: by module, the test that ran and the line of code.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.importers: dict[str, str] = {name: "before the session" for name in names if name in sys.modules}
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None, so that the import continues with the next finder."""
        if name in self._names and name not in self.importers:
            lines = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith("<frozen ")]
            test = os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition(" (")[0] or "a module of tests"
            self.importers[name] = f"in {test}, by {lines[-1].filename}:{lines[-1].lineno}"
        return None


_KNOWN: set[int] = set()
_OF_WORKERS: list[str] = []
_STATUS: list[int] = []
_FORBIDDEN = Watch(())
_BEGAN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    global _FORBIDDEN
    _FORBIDDEN = Watch([name for name in config.getoption("--forbid").split(",") if name])
    sys.meta_path.insert(0, _FORBIDDEN)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without taking the interpreter down where Ray was loaded.

    Threads of Ray and gloo may still run while modules are unloaded, and a process that had passed all its tests has
    crashed there. That the processes of users end with status 0 is tested with processes of their own.
    """
    sys.meta_path.remove(_FORBIDDEN)
    if "ray" in sys.modules and _STATUS and not hasattr(config, "workerinput"):
        _CACHE.cleanup()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_STATUS[-1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid", default="", help="comma-separated modules that this session must not import")
    parser.addoption("--complaints", default="", help="file for what is held against the whole session, a line each")
    parser.addoption("--forked-workers", action="store_true", help="Ray's workers do not import torch anew")
    parser.addoption("--part", default="", metavar="K/N", help="the Kth of N parts of the tests, chosen by their names")
    parser.addoption("--must-run", action="store_true", help="what a machine lacks the rights for fails, not skips")


# MKL chooses its kernels by the alignment and the layout of operands where the processor is not Intel's, so that plain
# PyTorch is not equal to itself there; see docs/design/0017. It is read when torch first multiplies.
if "GenuineIntel" not in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

# torch remembers what operations on stand-ins for tensors give, which pays from six equal layers on. The nets of tests
# have fewer, and are traced in three quarters of the time without; see docs/design/0054. It is read with torch.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Profiles of one session; nobody's own cache is read or filled.
_CACHE = tempfile.TemporaryDirectory(prefix="raypipe-cache-")
os.environ["RAYPIPE_CACHE_DIR"] = _CACHE.name


# Ray keeps the mode of the first session for the life of a process, and sets RAY_AUTH_MODE itself where nobody has:
# a session with a token before one without would leave its own actors unable to report to their owner. It reads both
# when it is imported. The token is thrown away with this session.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def pytest_sessionstart(session: pytest.Session) -> None:
    processes.adopt_orphans()
    _KNOWN.update(processes.descendants(os.getpid()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test has the mark of its tier, and ``long`` if it is; those marked ``last`` come last.

    With --part K/N, one test in N is kept. Which one depends on the test's name only.

    The engine's tests go to workers of pytest-xdist file by file, because those of a file use the same captures; a row
    of the zoo has a capture of its own.
    """
    root = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(root):
            tier = tiers.tier_of(item.path, root)
            item.add_marker(tier)
            if tiers.is_long(item.path, item.nodeid):
                item.add_marker("long")
            if (
                tier == "engine"
                and not item.path.is_relative_to(root / "zoo")
                and not item.get_closest_marker("xdist_group")
            ):
                item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(root))))
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)
    if part := config.getoption("--part"):
        mine, parts = map(int, part.split("/"))
        kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            kept[zlib.crc32(item.nodeid.encode()) % parts == mine % parts].append(item)
        config.hook.pytest_deselected(items=kept[False])
        items[:] = kept[True]


@pytest.fixture(autouse=True)
def _as_its_tier_runs(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("engine"):
        request.getfixturevalue("steady_engine")
    if "local_ray" in request.fixturenames:
        request.getfixturevalue("cluster")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Time a test; Ray's processes are not children of this one, so that only the clock times what uses Ray."""
    item.stash[_BEGAN] = _seconds(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """The junit report gets the seconds of a test and of its set-up, from which durations.py reads them."""
    yield
    stays_connected()
    item.user_properties.append(("cpu_s", round(_seconds(item) - item.stash[_BEGAN], 3)))


def _seconds(item: pytest.Item) -> float:
    if item.get_closest_marker("ray"):
        return time.monotonic()
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist says what its session complained of."""
    _OF_WORKERS.extend(getattr(node, "workeroutput", {}).get("complaints", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves processes behind or imported what it must not, and clean up."""
    complaints = list(_OF_WORKERS)
    left = processes.survivors(os.getpid(), _KNOWN, _PATIENCE_S)
    for pid, command in left.items():
        complaints.append(f"process {pid} was left behind and ended: {command[:200]}")
    processes.end(left)
    for module, by in _FORBIDDEN.importers.items():
        if module in sys.modules:  # and was not only looked for
            complaints.append(f"{module} was imported in a session that forbids it: {by}")
    _STATUS.append(int(session.exitstatus))
    if not complaints:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["complaints"] = complaints
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for complaint in complaints:
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"ERROR {complaint}", red=True)
    if file := session.config.getoption("--complaints"):
        Path(file).write_text("".join(f"{' '.join(complaint.splitlines())}\n" for complaint in complaints))
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    _STATUS.append(int(session.exitstatus))
