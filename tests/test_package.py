"""What the wheel is to hold besides modules is declared; `python jobs/check/wheel.py` builds, installs and uses it."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import PurePosixPath

from tests.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DECLARED = PROJECT["tool"]["setuptools"]["package-data"]["raypipe"]


def declared(path: PurePosixPath) -> bool:
    """Whether a pattern has this file; a star does not reach into folders."""
    return any(
        fnmatch(path.name, PurePosixPath(one).name) and path.parent == PurePosixPath(one).parent for one in DECLARED
    )


def test_every_file_of_the_package_is_installed() -> None:
    package = ROOT / "raypipe"
    files = [
        PurePosixPath(path.relative_to(package).as_posix())
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert PurePosixPath("starter/run.yaml") in files
    assert [str(path) for path in files if not declared(path)] == []


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "raypipe").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_raypipe_itself_needs_no_package_for_cuda_and_bounds_torch_on_both_sides() -> None:
    needed = PROJECT["project"]["dependencies"]
    assert [one for one in needed if one.startswith(("cupy", "nvidia", "cuda", "triton"))] == []
    (torch,) = (one for one in needed if one.startswith("torch"))
    assert torch.startswith("torch>=")
    assert ",<" in torch  # checkpoints and torch.cond lean on what is private there
