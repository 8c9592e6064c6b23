"""Resolution of paths and addresses in the user's configuration: variables, ``~``, relative paths, credentials.

    $HOME/runs, ~/runs      variables and the home folder are replaced; an unset variable is refused by name
    runs                    starts from the working directory
    s3://bucket/runs?...    stays, with its variables replaced; credentials in it are refused

In a Ray job that was submitted with a working_dir, the working directory is a copy that Ray unpacked, in a folder named
after its content. A run may read files there. It must not write there, because the next submission has another folder.
Therefore relative paths of output start from ``~/ray_results`` in such a job, as in Ray Train.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from raypipe.errors import ConfigError

DEFAULT_STORAGE = "~/ray_results"
"""Default storage_path, the same as that of Ray Train; ``raypipe list`` and commands with a run's name use it too."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_COPIES = ("runtime_resources", "working_dir_files")
"""Names of two nested folders in Ray's session folder, below which each node unpacks working directories."""
_SECRET = re.compile(r"secret|password|token|signature|access_key|account_key|^sas", re.IGNORECASE)


def is_address(text: str) -> bool:
    """Return True for a URI such as s3://bucket/runs, False for a local path."""
    return "://" in text


def expanded(text: str) -> str:
    """Replace $NAME, ${NAME} and a leading ``~`` in a path or URI, and return the result.

    Raises:
        ConfigError: a variable is not set, ``~NAME`` is no user's home folder, or a URI has credentials.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ConfigError(
                f"The path {_shown(text)} names the variable ${name}, which is not set. Set {name} in this process's "
                "environment, or write the path without it."
            )
        return os.environ[name]

    path = _VARIABLE.sub(value, text)
    if is_address(path):
        _refuse_credentials(path)
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        raise ConfigError(f"There is no user whose home folder {text} could be in. Give another path.") from None


def absolute_path(text: str, *, written: bool = False) -> str:
    """Expand variables and ``~`` in a path, and make a local path absolute; a URI is only expanded.

    A relative path starts from the working directory. In a Ray job with a working_dir, output starts from
    ``~/ray_results`` instead, and input too if it exists there and not in the working directory.

    Args:
        written: True for a path of a run's output.

    Raises:
        ConfigError: see ``expanded``; or a run would write into Ray's copy of a working directory.
    """
    found = expanded(text)
    if is_address(found):
        return found
    path = Path(found).absolute()
    kept = Path(DEFAULT_STORAGE).expanduser() / found if job_copy(Path.cwd()) else path
    if not written:
        return str(path if path.exists() or not kept.exists() else kept)
    if (copy := job_copy(kept)) is not None:
        raise ConfigError(
            f"{text} is in {copy}, Ray's copy of the job's working directory. The next submission has another one and "
            f"would begin anew. Give a relative path, which starts from {DEFAULT_STORAGE} in a job, or an absolute one "
            "elsewhere, or an s3:// or gs:// address."
        )
    return str(kept)


def job_copy(path: Path) -> Path | None:
    """Return the folder of Ray's copy of a job's working directory that contains ``path``; None outside of such copies.

    Args:
        path: absolute path.
    """
    at = next((i for i, pair in enumerate(pairwise(path.parts)) if pair == _COPIES), None)
    return None if at is None or len(path.parts) <= at + 2 else Path(*path.parts[: at + 3])


def _refuse_credentials(address: str) -> None:
    parts = urlsplit(address)
    user = parts.netloc.rpartition("@")[0]
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if _SECRET.search(name)]
    if ":" in user or names or re.search(r"://[^/?&]*@", parts.query):
        what = names[0] if names else "a user with a password"
        raise ConfigError(
            f"The address {_shown(address)} holds credentials ({what}), which would be written to the run's files and "
            "shown. Leave them out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the variables of your "
            "cloud) in the environment of every node, or give RunConfig(storage_filesystem=...)."
        )


def _shown(text: str) -> str:
    """Return a URI without its user and query, which may be secret; a local path is returned unchanged."""
    if not is_address(text):
        return text
    scheme, _, rest = text.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
