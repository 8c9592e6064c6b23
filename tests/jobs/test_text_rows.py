"""What becomes of texts before a model of Hugging Face is trained on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.train.text_rows import read_lines, write_rows

pytestmark = pytest.mark.engine

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<de>", "the", "cat", "runs"]
LENGTH = 5


def tokenizer(*, side: str = "right") -> Any:
    """Of a few words; targets begin with another token than texts, as those of translation models do."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    class Translates(transformers.PreTrainedTokenizerFast):  # type: ignore[misc, name-defined]
        def _switch_to_target_mode(self) -> None:
            self._tokenizer.post_processor = processors.TemplateProcessing("<de> $A", special_tokens=[("<de>", 4)])

        def _switch_to_input_mode(self) -> None:
            self._tokenizer.post_processor = processors.TemplateProcessing("$A")

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return Translates(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        padding_side=side,
    )  # fmt: skip


def rows(folder: Path, task: str, *lines: dict[str, Any], side: str = "right") -> dict[str, list[Any]]:
    file = write_rows(task, dict(enumerate(lines, 1)), tokenizer(side=side), LENGTH, str(folder / "rows.parquet"))
    found: dict[str, list[Any]] = pq.read_table(file).to_pydict()
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_ends_with_its_token_and_padding_stands_behind_it(tmp_path: Path, side: str) -> None:
    """Positions of a text count from 0, on whatever side the tokenizer pads for generating."""
    found = rows(tmp_path, "causal", {"text": "the cat runs"}, {"text": "cat"}, side=side)
    assert found["input_ids"] == [[5, 6, 7, 2, 0], [6, 2, 0, 0, 0]]
    assert found["labels"] == [[5, 6, 7, 2, -100], [6, 2, -100, -100, -100]]


def test_a_text_that_was_cut_does_not_end(tmp_path: Path) -> None:
    found = rows(tmp_path, "causal", {"text": "the cat runs the cat runs"}, {"text": "the cat </s>"})
    assert found["input_ids"] == [[5, 6, 7, 5, 6], [5, 6, 2, 0, 0]]


def test_targets_are_written_as_targets(tmp_path: Path) -> None:
    found = rows(tmp_path, "seq2seq", {"text": "the cat", "target": "cat"}, {"text": "runs", "target": "the cat runs"})
    assert found["labels"] == [[4, 6, -100, -100, -100], [4, 5, 6, 7, -100]]
    assert found["input_ids"] == [[5, 6, 0, 0, 0], [7, 0, 0, 0, 0]]
    assert found["attention_mask"] == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_only_line_ends_end_a_line(tmp_path: Path) -> None:
    """Texts hold U+2028, U+0085 and form feeds, which JSON need not escape."""
    texts = ["a\u2028b", "c\x85d", "e\u2029f"]
    file = tmp_path / "rows.jsonl"
    file.write_bytes("\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode())
    assert [row["text"] for row in read_lines(file).values()] == texts
    plain = tmp_path / "rows.txt"
    plain.write_bytes(b"a\x0cb\n\nc\n")
    assert read_lines(plain) == {1: {"text": "a\x0cb"}, 3: {"text": "c"}}
