"""jobs/train/vision.py, in threads: digits that are learned and go on, CIFAR's files, a folder of images, mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.lib.pipeline_nets import densenet121, resnet50, vgg16
from jobs.train.images import read_images

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def vision(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "jobs/train/vision.py", "--local", "--name", "run", "--storage", str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=environment)


def test_digits_are_trained_from_a_file_of_flags_and_go_on(tmp_path: Path) -> None:
    config = tmp_path / "digits.yaml"
    config.write_text("steps: 3\nwidth: 8\ndepth: 2\nlogger: tensorboard\n")
    done = vision(tmp_path, "--config", str(config))
    assert done.returncode == 0, done.stderr
    assert "step 3 " in done.stdout
    assert "held out)" in done.stdout
    assert list((tmp_path / "run/tensorboard").glob("events.*"))
    again = vision(tmp_path, "--config", str(config), "--steps", "5")
    assert again.returncode == 0, again.stderr
    assert "step 5 " in again.stdout


def test_mistakes_end_with_a_status_and_say_what(tmp_path: Path) -> None:
    config = tmp_path / "digits.yaml"
    config.write_text("stepps: 3\n")
    done = vision(tmp_path, "--config", str(config))
    assert done.returncode == 2
    assert "stepps is unknown; did you mean steps?" in done.stderr
    done = vision(tmp_path, "--data", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "nowhere is no folder" in done.stderr


def test_cifar_s_binary_files_are_read_and_its_pickles_are_not(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    rows = drawn.integers(0, 256, (6, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        (tmp_path / name).write_bytes(rows.tobytes())
    found = read_images(tmp_path, 32)
    assert (found.channels, found.size, len(found.classes)) == (3, 32, 10)
    assert found.splits["train"].pixels.shape == (12, 3072)
    assert (found.splits["heldout"].labels == rows[:, 0]).all()
    assert (found.splits["heldout"].pixels == rows[:, 1:]).all()
    (tmp_path / "test_batch.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(ValueError, match="is it whole"):
        read_images(tmp_path, 32)
    pickles = tmp_path / "python"
    pickles.mkdir()
    (pickles / "data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="made of pickles"):
        read_images(pickles, 32)


def test_a_folder_of_images_is_resized_and_labelled_by_its_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split, count in (("train", 3), ("val", 1)):
        for label, name in enumerate(("cats", "dogs")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (9, 7), (label * 255, 0, 0)).save(tmp_path / split / name / f"{number}.png")
    found = read_images(tmp_path, 4)
    assert list(found.classes) == ["cats", "dogs"]
    assert found.splits["train"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.splits["heldout"].pixels.shape == (2, 48)
    assert found.splits["heldout"].pixels[1, :16].tolist() == [255] * 16


@pytest.mark.parametrize(
    ("build", "parameters"), [(vgg16, 138_357_544), (resnet50, 25_557_032), (densenet121, 7_978_856)]
)
def test_the_nets_of_benchmarks_are_those_of_the_papers(build: Any, parameters: int) -> None:
    """As many parameters as torchvision's, with ImageNet's thousand classes."""
    with torch.device("meta"):
        assert sum(p.numel() for p in build(classes=1000).parameters()) == parameters
