"""Parts of the benchmark of recoveries: it reads the events of a run while they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench.recovery.nets import events

pytestmark = pytest.mark.ray

LINES = [{"decision": "spare", "reason": f"{at}: é"} for at in range(2)] + [{"decision": "resize", "reason": "more"}]


def test_a_line_that_is_being_written_is_not_an_event_yet(tmp_path: Path) -> None:
    assert events(tmp_path, "spare") == []
    data = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in LINES)
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        (tmp_path / "events.jsonl").write_bytes(data[:size])
        written = LINES[: sum(end <= size for end in ends)]
        for decision in ("spare", "resize"):
            assert events(tmp_path, decision) == [line for line in written if line["decision"] == decision]
