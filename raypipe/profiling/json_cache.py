"""Cache of results in JSON files with checksums, one file for each key.

A file is complete or absent, and an unreadable one counts as absent. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.engine.io.storage import Place

MOST_FILES = 256


def cache_folder(kind: str = "profiles", environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder ``kind`` in RAYPIPE_CACHE_DIR, or in ~/.cache/raypipe if that is not set.

    Args:
        environment: environment variables; None for those of this process.
    """
    chosen = (os.environ if environment is None else environment).get("RAYPIPE_CACHE_DIR")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "raypipe") / kind


@dataclass(frozen=True, slots=True)
class JsonCache:
    """Folder with a file for each key, of which the ``most`` newest are kept."""

    folder: Path
    most: int = MOST_FILES

    def load(self, key: str) -> Any:
        """Read the saved content; None if it is missing or damaged."""
        try:
            saved = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            return saved["content"] if saved["sha256"] == _checksum(saved["content"]) else None
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def save(self, key: str, content: Any) -> None:
        """Write content that is JSON atomically: a reader finds a complete file or none.

        Raises:
            OSError, PlaceError: the folder cannot be written to.
        """
        data = json.dumps({"sha256": _checksum(content), "content": content}, indent=1).encode()
        # Two processes may save the result of one key at once.
        Place.of(self.folder).write_bytes(f"{key}.json", data, partial=f".{key[:12]}.{os.getpid()}.tmp")
        for old in self._by_age()[: -self.most]:
            old.unlink(missing_ok=True)

    def _by_age(self) -> list[Path]:
        """List the files, oldest first; another process may remove some meanwhile."""
        ages = []
        for path in self.folder.glob("*.json"):
            with suppress(FileNotFoundError):
                ages.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(ages)]


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
