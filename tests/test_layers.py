"""The layers of the house, as one table: who may import what, at any place in a file.

       use        api/  hf/  cli/  runfile/  starter/  doctor/  report/  dashboards/  testing.py  tune.py
        |
       run        prepare/  preflight/  run/  runtime/  progress.py
     +--+---+
 decide   compute
planner/  engine/  capture/  profiling/
     |      data/
     +--+---+
       data       ir/  viz/  config/  callbacks/  errors.py  metrics.py

Below that, rooms stand in one order, and neither files nor folders import each other in a circle.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import FILES, ROOT, imported, imports, module_of, tree_of


class Layer(NamedTuple):
    """Modules of a layer, the layers and outside packages that it may import, and what it may not."""

    modules: tuple[str, ...]
    layers: tuple[str, ...]
    packages: tuple[str, ...]
    never: tuple[str, ...] = ()


# Deciding is pure: the clock, chance, the environment and logs stay outside, and come in as arguments.
IMPURE = ("time", "datetime", "random", "secrets", "uuid", "os", "socket", "subprocess", "threading", "logging")

LAYERS = {
    "data": Layer(("ir", "viz", "config", "errors", "metrics", "callbacks"), ("data",), ()),
    "decide": Layer(("planner",), ("data", "decide"), ("numpy",), IMPURE),
    "compute": Layer(
        ("engine", "capture", "profiling", "data", "user_lines", "splitmix"),
        ("data", "compute"),
        ("numpy", "pyarrow", "safetensors", "torch", "xxhash"),
    ),
    "run": Layer(
        ("run", "runtime", "preflight", "prepare", "progress"),
        ("data", "decide", "compute", "run"),
        ("numpy", "pandas", "pyarrow", "ray", "rich", "safetensors", "torch", "xxhash"),
    ),
}
USE = Layer(
    ("",),
    ("data", "decide", "compute", "run", "use"),
    ("numpy", "pandas", "pyarrow", "ray", "rich", "safetensors", "torch", "typer", "yaml"),
)

ROOMS = (
    "version",
    "errors",
    "metrics",
    "ir",
    "viz",
    "config",
    "callbacks",
    "planner",
    "splitmix",
    "user_lines",
    "data",
    "engine",
    "capture",
    "profiling",
    "preflight",
    "run",
    "progress",
    "prepare",
    "testing",
    "runtime.transport",
    "runtime.worker",
    "runtime.nodes",
    "runtime.fleet",
    "runtime.driver",
    "runfile",
    "doctor",
    "dashboards",
    "report",
    "starter",
    "api",
    "hf",
    "tune",
    "cli",
)
"""From the ground up: a room imports from those above it in this list, never from one below it."""

# Inside decide: which of its parts each part knows, besides itself.
PARTS = {
    "cost": ("schedule", "simulator", "dependency_tables"),
    "partition": ("cost",),
    "compiled_rows": (),
    "dependency_tables": ("compiled_rows",),
    "simulator": ("compiled_rows", "dependency_tables"),
    "schedule": ("compiled_rows", "dependency_tables", "simulator"),
    "replay": ("schedule", "simulator", "dependency_tables", "compiled_rows"),
    "candidates": ("cost", "schedule"),
    "search": ("candidates", "cost", "partition", "replay", "schedule", "simulator", "dependency_tables"),
    "controller": ("candidates", "cost", "replay"),
    "elastic": ("schedule", "search"),
    "repartition": ("controller", "elastic", "partition", "search"),
    "liveness": (),
    "segments": ("schedule",),
    "copy_interval": (),
}

# Data of ir draws itself in notebooks, and prints itself, by functions of viz that it imports inside a method.
SHOWN_BY = ("raypipe.viz.plan_svg", "raypipe.viz.plan_text", "raypipe.viz.timeline_svg")

# One file may reach for one package more.
EXTRA = {
    "engine/codec/cuda.py": ("cupy",),
    "engine/device/cuda_ipc.py": ("cupy",),
    "capture/decode_recipe.py": ("transformers",),
    "engine/stage/quantized_linear.py": ("bitsandbytes",),
    "api/notebook.py": ("IPython",),
    "data/datasets.py": ("PIL",),
    "hf/parts.py": ("accelerate", "transformers"),
    "hf/trainer_loss.py": ("accelerate",),
    "hf/pipelined_trainer.py": ("transformers",),
    "hf/trainer_events.py": ("transformers",),
    "hf/training_arguments.py": ("transformers",),
    "hf/trl_trainers.py": ("trl",),
}


def layer_of(module: str) -> str:
    """Name of the layer that ``raypipe.<part>...`` is in."""
    part = module.split(".")[1] if "." in module else ""
    return next((name for name, layer in LAYERS.items() if part in layer.modules), "use")


def breaches(path: str, tree: ast.Module) -> list[str]:
    """Imports of ``raypipe/<path>`` that its layer does not allow."""
    package = ".".join(["raypipe", *Path(path).parent.parts])
    own = ".".join(["raypipe", *Path(path).with_suffix("").parts])
    name = layer_of(own)
    layer = LAYERS.get(name, USE)
    found = []
    for module in imports(tree, package):
        top = module.split(".")[0]
        if module == "raypipe.__version__" or _shows(own, module.rpartition(".")[0]):
            allowed = True
        elif top == "raypipe":
            allowed = layer_of(module) in layer.layers and room_of(module) <= room_of(own) and _known(path, module)
        elif top in sys.stdlib_module_names:
            allowed = top not in layer.never
        else:
            allowed = top in layer.packages + EXTRA.get(path, ())
        if not allowed:
            found.append(f"raypipe/{path} is in layer {name!r} and may not import {module}")
    return found


def _shows(own: str, target: str) -> bool:
    """Whether data reaches for the function that shows it."""
    return own.startswith("raypipe.ir.") and target in SHOWN_BY


def room_of(module: str) -> int:
    """Place in ROOMS of ``raypipe.<room>...``; the package itself, which names what others export, is above all."""
    inside = module.removeprefix("raypipe").lstrip(".") + "."
    return next(
        (n for n, room in enumerate(ROOMS) if inside.startswith(f"{room}.")), -1 if inside == "." else len(ROOMS)
    )


def _known(path: str, module: str) -> bool:
    """Whether two parts of the planner may know each other; True outside of it."""
    own, other = Path(path).with_suffix("").parts, module.split(".")
    if own[0] != "planner" or other[1:2] != ["planner"] or len(own) < 2 or len(other) < 3:
        return True
    return other[2] == own[1] or other[2] in PARTS.get(own[1], ())


def imported_files() -> dict[str, set[str]]:
    """Modules of raypipe by the one that imports them."""
    return {
        module: {target for target in imported(module) if target.startswith("raypipe.") and not _shows(module, target)}
        for module in map(module_of, FILES)
        if module != "raypipe"
    }


@pytest.mark.slow
def test_files_import_what_their_layer_allows() -> None:
    assert len(FILES) > 150
    found = {path: breaches(path.relative_to(ROOT / "raypipe").as_posix(), tree_of(path)) for path in FILES}
    assert {str(path.relative_to(ROOT)): what for path, what in found.items() if what} == {}


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle() -> None:
    found = imported_files()
    assert len(found) > 150
    list(TopologicalSorter(found).static_order())  # CycleError names the files


@pytest.mark.slow
def test_no_folders_and_files_beside_each_other_import_each_other_in_a_circle() -> None:
    """A folder counts as a whole, with all that is in it."""
    found: dict[str, set[str]] = {}
    for module, targets in imported_files().items():
        for target in targets:
            own, other = module.split("."), target.split(".")
            level = next((at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if level is not None:
                found.setdefault(".".join(own[: level + 1]), set()).add(".".join(other[: level + 1]))
    assert len(found) > 100
    list(TopologicalSorter(found).static_order())


def test_every_file_is_in_a_room() -> None:
    inside = {path.relative_to(ROOT / "raypipe").with_suffix("").as_posix().replace("/", ".") for path in FILES}
    homeless = {module for module in inside if room_of(f"raypipe.{module}") == len(ROOMS)}
    assert homeless <= {module for module in inside if module.endswith("__init__")}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ir/graph.py", "import numpy"),
        ("config/pipeline.py", "from raypipe.planner import simulator"),
        ("planner/search.py", "def f():\n    import torch"),
        ("planner/controller.py", "import time"),
        ("planner/schedule/sync.py", "from ..partition import chain"),
        ("planner/simulator.py", "from raypipe.planner.schedule.sync import k_f_k_b"),
        ("runtime/transport/tcp.py", "from raypipe.runtime.fleet import fleet"),
        ("engine/stage/stage.py", "import ray"),
        ("engine/stage/stage.py", "from raypipe.planner import simulator"),
        ("engine/stage/stage.py", "from raypipe import runtime"),
        ("data/open_data.py", "import cupy"),
        ("data/open_data.py", "from raypipe.engine.stage.feed import Feed"),
        ("runtime/fleet/fleet.py", "from raypipe.api.trainer import PipelineTrainer"),
        ("runtime/fleet/fleet.py", "import importlib\nimportlib.import_module('raypipe.cli')"),
        ("api/trainer.py", "import requests"),
    ],
)
def test_a_breach_is_found(path: str, source: str) -> None:
    assert len(breaches(path, ast.parse(source))) == 1


@pytest.mark.slow
def test_what_holds_data_and_decides_loads_alone() -> None:
    modules = [module for module in map(module_of, FILES) if layer_of(module) in ("data", "decide")]
    assert len(modules) > 80
    check = f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert {"torch", "ray", "pyarrow"}.isdisjoint(done.stdout.split())
