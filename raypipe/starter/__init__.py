"""``raypipe init``: a run file that trains as it stands, and the module that it names.

    run.yaml ----names----> model.py       both are copied as they are; model.py is a module of this package,
                                           so that it is checked and tested like all others

The task takes seconds on a processor and has a known answer: points of three spirals, classified by a small network.
Nothing is downloaded. Neither torch nor Ray is imported here.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from raypipe.errors import ConfigError

__all__ = ["FILES", "write"]

FILES = ("run.yaml", "model.py")


def write(folder: str | Path) -> list[Path]:
    """Write the starter's files into a folder, which is created if it does not exist.

    Returns:
        Paths of the files, ``run.yaml`` first.

    Raises:
        ConfigError: one of the files exists already (then none is written), or the folder cannot be written to.
    """
    folder = Path(folder)
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"{folder} already has {' and '.join(there)}, and nothing was written: init replaces no file. Name another "
            "folder, as in: raypipe init first"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = files(__name__).joinpath(name).read_text("utf-8")
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}. Name another folder.") from error
    return [folder / name for name in FILES]
