"""``python -m raypipe.cli``."""

from __future__ import annotations

from raypipe.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
