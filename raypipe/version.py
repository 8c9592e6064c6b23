"""Version of this raypipe, which changes with its code:

    0.1.0.dev1097+g1a2b3c4d            a clone: number of commits, and the last one
    0.1.0.dev1097+g1a2b3c4d.d5e6f7a8   with changes that are not committed, by a digest of the code
    as built                           a wheel or an unpacked sdist
    0.1.0+d5e6f7a8                     copied files, as in a working_dir of Ray

Setuptools imports this file alone when it builds, so it needs the standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import subprocess
from pathlib import Path

RELEASE = "0.1.0"
"""Number of the next release; all versions until then are development versions of it."""
PACKAGE = Path(__file__).resolve().parent
TIMEOUT_S = 10.0


@functools.cache
def version() -> str:
    """Return the version of the raypipe that this process has imported; see ``version_of``."""
    return version_of(PACKAGE)


def version_of(package: Path) -> str:
    """Return the version of the raypipe in a folder.

    It is derived from git in a clone, else from the metadata of the installed or unpacked distribution, else from a
    digest of the code.
    """
    return _from_git(package) or _as_built(package) or f"{RELEASE}+d{_digest(package)}"


def _from_git(package: Path) -> str:
    """Derive the version from the commits of a clone; "" if the folder is not in a clone, or git fails."""
    root = package.parent
    # Another project may have a copy of raypipe in its own repository.
    if not (root / ".git").exists() or 'name = "raypipe"' not in _read(root / "pyproject.toml"):
        return ""
    git = ["git", "-c", "safe.directory=*", "-C", str(root)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # of a hook
    run = functools.partial(subprocess.run, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    try:
        count, sha, changed = (
            run([*git, *call], check=True).stdout.strip()
            for call in (
                ["rev-list", "--count", "HEAD"],
                ["rev-parse", "--short=8", "HEAD"],
                ["status", "--porcelain", "--", package.name],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{RELEASE}.dev{count}+g{sha}" + (f".d{_digest(package)}" if changed else "")


def _as_built(package: Path) -> str:
    """Return the version in the metadata of the distribution that has these files; "" if they were copied from it."""
    for line in _read(package.parent / "PKG-INFO").splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ").strip()
    try:
        built = importlib.metadata.distribution("raypipe")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return built.version if Path(str(built.locate_file(package.name))).resolve() == package else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _digest(package: Path) -> str:
    """Return a digest of all Python files below a folder, as 8 hexadecimal digits."""
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        found.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:8]
