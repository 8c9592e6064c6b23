"""Run bench.py as a module."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from jobs.bench.codec_loss.bench import main

sys.exit(main())
