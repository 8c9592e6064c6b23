"""Runs bench.py as a module with a name, so that processes that the benchmark starts find its functions."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from jobs.bench.host.bench import main

sys.exit(main())
