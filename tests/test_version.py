"""The version changes with the code, in a clone and without one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from raypipe.version import RELEASE, version_of

ROOT = Path(__file__).parents[1]


def git(folder: Path, *words: str) -> str:
    as_somebody = ("-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *as_somebody, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A raypipe of one file, outside of any clone."""
    folder = tmp_path / "root" / "raypipe"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text("A = 1\n")
    shutil.copy(ROOT / "pyproject.toml", folder.parent)
    return folder


@pytest.mark.slow
def test_a_clone(package: Path) -> None:
    seen = []
    git(package.parent, "init", "-q")
    for number in (1, 2):
        (package / "version.py").write_text(f"A = {number}\n")
        git(package.parent, "add", "-A")
        git(package.parent, "commit", "-q", "-m", "a change")
        sha = git(package.parent, "rev-parse", "HEAD")[:8]
        seen.append(version_of(package))
        assert seen[-1] == f"{RELEASE}.dev{number}+g{sha}"
    (package.parent / "notes.txt").write_text("outside of the package")
    assert version_of(package) == seen[-1]
    for text in ("A = 3\n", "A = 4\n"):
        (package / "version.py").write_text(text)
        seen.append(version_of(package))
        assert seen[-1].startswith(f"{seen[1]}.d")
    assert len(set(seen)) == 4
    assert Version(seen[0]) < Version(seen[1]) < Version(seen[2])
    elsewhere = package.parent.parent / "elsewhere" / "raypipe"
    shutil.copytree(package, elsewhere)
    git(package.parent, "checkout", "-q", ".")
    assert version_of(package) == seen[1]
    assert version_of(elsewhere).startswith(f"{RELEASE}+d"), "files without their clone, as in a working_dir"


def test_files_alone(package: Path) -> None:
    was = version_of(package)
    assert was == version_of(package)
    assert was.startswith(f"{RELEASE}+d")
    (package / "version.py").write_text("A = 2\n")
    assert version_of(package) != was


@pytest.mark.slow
def test_a_copy_in_the_repository_of_another_project(package: Path) -> None:
    (package.parent / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    was = version_of(package)
    git(package.parent, "init", "-q")
    git(package.parent, "add", "-A")
    git(package.parent, "commit", "-q", "-m", "mine")
    assert version_of(package) == was


def test_an_unpacked_sdist(package: Path) -> None:
    (package.parent / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: raypipe\nVersion: 0.1.0.dev7+g123\n\nText")
    assert version_of(package) == "0.1.0.dev7+g123"
