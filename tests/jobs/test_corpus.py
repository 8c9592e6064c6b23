"""The demo corpus: real text, splits that share no file, rows shifted by one byte, honest yardsticks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.train import corpus

pytestmark = pytest.mark.core


def flat(path: Path, name: str) -> bytes:
    return pq.read_table(path)[name].combine_chunks().flatten().to_numpy().tobytes()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.build_corpus(tmp_path_factory.mktemp("corpus"), context=16, max_bytes=400_000)


@pytest.mark.slow
def test_rows_are_the_text_and_targets_one_byte_later(built: corpus.Corpus) -> None:
    for path, text in [(built.train, built.train_text), (built.heldout, built.heldout_text)]:
        table = pq.read_table(path)
        assert table.schema.field("tokens").type == pa.list_(pa.uint8(), 16)
        assert table.schema.field("targets").type == pa.list_(pa.uint8(), 16)
        assert table.num_rows == (len(text) - 1) // 16
        assert flat(path, "tokens") == text[: table.num_rows * 16]
        assert flat(path, "targets") == text[1 : table.num_rows * 16 + 1]


@pytest.mark.slow
def test_splits_are_of_whole_files_and_bounded(built: corpus.Corpus) -> None:
    train, heldout = (set(text.split(b"\0")) - {b""} for text in (built.train_text, built.heldout_text))
    assert train.isdisjoint(heldout)
    files = len(train) + len(heldout)
    assert len(train) > 5
    assert len(heldout) > 1
    # One byte more per file: the mark of its end.
    assert len(built.train_text) + len(built.heldout_text) == 400_000 + files
    assert b"import " in built.heldout_text


def test_entropies_of_known_texts() -> None:
    assert corpus.bigram_entropy_nats(b"ababababa") == 0.0
    # After a come b and c equally often; after b and c always a.
    assert corpus.bigram_entropy_nats(b"abac" * 100 + b"a") == pytest.approx(math.log(2) / 2)
    random = np.random.default_rng(0).integers(0, 256, 2_000_000, dtype=np.uint8).tobytes()
    assert corpus.bigram_entropy_nats(random) == pytest.approx(math.log(256), rel=0.01)
