"""What the training jobs refuse before anything is trained, and where they put what they write."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from jobs.train import lm
from jobs.train.finetune_hf import task_of
from jobs.train.images import read_images
from jobs.train.options import add_common, arguments_of
from jobs.train.text_rows import count_classes, read_lines


def asked(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_common(parser, name="run", minibatch_size=4, learning_rate=1.0)
    return arguments_of(parser, words)


def labelled(*labels: Any) -> dict[int, dict[str, Any]]:
    return {number: {"text": "a", "label": label} for number, label in enumerate(labels, 1)}


@pytest.mark.parametrize("words", [("--conf", "x.yaml"), ("--checkpoint-interval-steps", "0"), ("--keep-best",)])
def test_flags_without_an_effect_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        asked(*words)


@pytest.mark.parametrize("labels", [(0.5, 1.5), (0, -1), ("good", "bad"), (0, float("nan"))])
def test_labels_that_are_no_numbers_of_classes_are_refused(labels: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="Labels are whole numbers from 0"):
        count_classes(labelled(*labels))


def test_a_missing_label_is_told_by_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": 0}\n\n{"text": ""}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="Line 4 has no 'label'"):
        count_classes(read_lines(file))


def test_an_encoder_is_not_trained_as_a_causal_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ValueError, match="--task"):
        task_of(tmp_path, {1: {"text": "a"}})
    assert task_of(tmp_path, {1: {"text": "a"}, 2: {"text": "b", "label": 1}}) == "classify"
    config.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    assert task_of(tmp_path, {1: {"text": "a"}}) == "causal"


def test_classes_that_only_the_held_out_images_have_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("train/cat", "train/dog", "val/cat", "val/fox"):
        (tmp_path / name).mkdir(parents=True)
        image.new("RGB", (4, 4)).save(tmp_path / name / "0.png")
    with pytest.raises(ValueError, match="fox"):
        read_images(tmp_path, 4)
    with pytest.raises(ValueError, match="2 images, of which none would be held out"):
        read_images(tmp_path / "train", 4)


def test_the_language_model_takes_storage_as_a_uri_or_as_a_folder() -> None:
    for uri in ("s3://bucket/runs", "gs://bucket/runs", "file:///shared/runs"):
        assert lm.run_config(lm.parse(["--storage", uri])).storage_path == uri
    assert lm.run_config(lm.parse(["--storage", "runs"])).storage_path == str(Path("runs").absolute())
