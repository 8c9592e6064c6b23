"""Padding, packing and image folders: what a batch is, checked against what a person would write by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.data import Images, Packed, Pad
from raypipe.data.open_data import open_data
from raypipe.errors import ConfigError, DataError

RAGGED = [{"input_ids": list(range(1, n + 2)), "text": "x" * n, "n": n} for n in range(7)]
DOCUMENTS = [[5, 7, 9], [4, 8, 2, 6], [], [3, 1]]


def test_pad_fills_to_the_smallest_length_that_holds_all() -> None:
    batch = Pad((4, 8), labels="input_ids")(RAGGED[1:3])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [1, 2, 3, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["n"].tolist() == [1, 2]
    assert "text" not in batch
    assert Pad((4, 8))(RAGGED)["input_ids"].shape == (7, 8)


def test_pad_follows_a_tokenizer() -> None:
    tokenizer = SimpleNamespace(pad_token_id=9, padding_side="left")
    assert Pad(4, tokenizer)(RAGGED[1:2])["input_ids"].tolist() == [[9, 9, 1, 2]]
    with pytest.raises(ConfigError, match="has no pad token"):
        Pad(4, SimpleNamespace(pad_token_id=None))


def test_pad_cuts_off_only_where_it_is_told_to() -> None:
    with pytest.raises(DataError, match="An item has 7 values, more than the length 4"):
        Pad(4)(RAGGED)
    assert Pad(4, truncate=True)(RAGGED)["input_ids"][6].tolist() == [1, 2, 3, 4]


def test_pad_keeps_values_that_the_first_item_has_no_type_for() -> None:
    items = [{"x": [], "n": np.array([1], dtype=np.int8)}, {"x": [0.5], "n": np.array([300], dtype=np.int16)}]
    batch = Pad(1)([{"x": [1], "n": np.array([1], dtype=np.int8)}, items[1]])
    assert batch["x"].tolist() == [[1.0], [0.5]]
    assert (batch["n"].tolist(), batch["n"].dtype) == ([[1], [300]], torch.int64)
    assert Pad(1)(items)["x"].tolist() == [[0.0], [0.5]]


def test_labels_of_padding_that_a_tokenizer_put_in_are_left_out() -> None:
    item = {"input_ids": [5, 7, 0], "attention_mask": [1, 1, 0]}
    assert Pad(4, labels="input_ids")([item])["labels"].tolist() == [[5, 7, -100, -100]]
    with pytest.raises(DataError, match="have a column 'labels'"):
        Pad(4, labels="input_ids")([{**item, "labels": [1, 2, 3]}])


@pytest.mark.parametrize(
    ("items", "given", "words"),
    [
        (RAGGED, {"labels": "words"}, r"Pad\(labels='words'\): the columns that are padded are input_ids, n"),
        (RAGGED, {"columns": ["input_ids", "text"]}, "The column 'text' of an item is not a list of numbers"),
        ([{"x": [1]}, {"x": [[1, 2], [3]]}], {}, "The column 'x' of an item is not a list of numbers"),
        ([{"x": [[1]]}, {"x": [[1, 2]]}], {}, "'x' has other shapes in other items"),
    ],
)
def test_what_pad_cannot_put_together_is_named(items: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Pad(8, **given)(items)


def test_an_empty_item_has_the_shape_of_the_others() -> None:
    assert Pad(2)([{"x": []}, {"x": [[1, 2, 3]]}])["x"].tolist() == [[[0] * 3] * 2, [[1, 2, 3], [0] * 3]]


@pytest.mark.parametrize("lengths", [0, (), (4, -1), "128"])
def test_lengths_that_are_none(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="Pad"):
        Pad(lengths)


@pytest.mark.parametrize("as_dicts", [False, True])
@pytest.mark.parametrize("separator", [None, 0])
def test_packed_blocks_are_the_stream_cut_into_pieces(separator: int | None, as_dicts: bool) -> None:
    stream = [t for d in DOCUMENTS for t in [*d, *([] if separator is None else [separator])]]
    documents: Any = [{"input_ids": d} for d in DOCUMENTS] if as_dicts else DOCUMENTS
    packed = Packed(documents, 4, separator=separator)
    blocks = [packed[i]["input_ids"].tolist() for i in range(len(packed))]
    assert blocks == [stream[i : i + 4] for i in range(0, len(stream) - 3, 4)]
    following = Packed(documents, 3, separator=separator, labels="next")
    pairs = [following[i] for i in range(len(following))]
    assert [x.tolist() for x, _ in pairs] == [stream[i : i + 3] for i in range(0, len(stream) - 3, 3)]
    assert all(y.tolist() == stream[3 * i + 1 : 3 * i + 4] for i, (_, y) in enumerate(pairs))


@pytest.mark.parametrize("separator", [None, 0])
def test_packed_documents_that_stand_apart(separator: int | None) -> None:
    """Positions, mask and targets of every block against those of the documents one by one."""
    tail = [] if separator is None else [separator]
    stream = [(number, token) for number, document in enumerate(DOCUMENTS) for token in [*document, *tail]]
    packed = Packed(DOCUMENTS, 4, separator=separator, apart=True)
    following = Packed(DOCUMENTS, 3, separator=separator, labels="next", apart=True)
    for index in range(len(packed)):
        block = stream[4 * index : 4 * index + 4]
        found, numbers = packed[index], [number for number, _ in block]
        assert found["input_ids"].tolist() == [token for _, token in block]
        assert found["position_ids"].tolist() == [numbers[:at].count(numbers[at]) for at in range(4)]
        begins = [at > 0 and numbers[at] != numbers[at - 1] for at in range(4)]
        labels = [-100 if first else token for first, (_, token) in zip(begins, block, strict=True)]
        assert found["labels"].tolist() == labels
        seen = [[i >= j and numbers[i] == numbers[j] for j in range(4)] for i in range(4)]
        assert (found["attention_mask"] == 0).tolist() == [seen]
        assert found["attention_mask"].min() in (0, torch.finfo(torch.float32).min)
    for index in range(len(following)):
        block = stream[3 * index : 3 * index + 4]
        given, positions, mask, targets = following[index]
        assert (len(given), len(positions), mask.shape) == (3, 3, (1, 3, 3))
        pairs = pairwise(block)
        assert targets.tolist() == [-100 if here[0] != then[0] else then[1] for here, then in pairs]


def test_packed_refuses_what_fills_no_block() -> None:
    with pytest.raises(DataError, match="4 documents have 9 tokens, too few for one block of 10"):
        Packed(DOCUMENTS, 10)
    with pytest.raises(DataError, match="has no column 'input_ids', but text"):
        Packed([{"text": "a"}], 2)
    with pytest.raises(DataError, match="has a column 'labels'"):
        Packed([{"input_ids": [1, 2], "labels": [-100, 2]}], 2)
    with pytest.raises(IndexError):
        Packed(DOCUMENTS, 4)[2]


def test_images_of_folders_of_classes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for name in ("dog/b", "cat/a", "cat/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.fromarray(pixels + len(name)).save(tmp_path / f"{name}.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    found = Images(tmp_path)
    assert (len(found), found.classes, [found[i][1] for i in range(3)]) == (3, ("cat", "dog"), [0, 0, 1])
    expected = torch.from_numpy((pixels + 5).transpose(2, 0, 1).astype(np.float32) / 255)
    assert torch.equal(found[0][0], expected)
    assert Images(tmp_path, (2, 3), mode="L", transform=lambda x: x + 1)[0][0].shape == (1, 2, 3)
    images, labels = open_data(Images(tmp_path, 8), seed=0).read(0, 0, 3, (0, 1))
    assert (images.shape, sorted(labels.tolist())) == ((3, 3, 8, 8), [0, 0, 1])
    with pytest.raises(DataError, match="has no images in folders of classes"):
        Images(tmp_path / "cat")


def test_folders_and_images_that_are_none(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", ".cache"):
        (tmp_path / name).mkdir()
        image.fromarray(np.full((2, 2), 9, dtype=np.uint8)).save(tmp_path / name / "a.png")
    assert Images(tmp_path).classes == ("cat",)
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match="dog has no images"):
        Images(tmp_path)
    image.fromarray(np.full((2, 2), 900, dtype=np.uint16)).save(tmp_path / "dog" / "deep.png")
    with pytest.raises(DataError, match="more than 8 bits per pixel"):
        Images(tmp_path)[1]


def test_hidden_files_are_no_images_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    image.fromarray(np.arange(4800, dtype=np.uint8).reshape(40, 40, 3)).save(tmp_path / "cat" / "a.jpg")
    (tmp_path / "cat" / "._a.jpg").write_bytes(b"what macOS writes beside a file")
    assert len(Images(tmp_path)) == 1
    whole = (tmp_path / "cat" / "a.jpg").read_bytes()
    (tmp_path / "cat" / "b.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cat/b\.jpg cannot be read: .*[Tt]runcated.*leave it out"):
        Images(tmp_path)[1]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("splits", r"A DatasetDict of 'train', 'test' is not a dataset.*data\['train'\]"),
        ("columns", r"A dict of 'x', 'y' is not a dataset.*pyarrow\.table\(data\)"),
        ("pair", r"A tuple of 2 Tensors is not a dataset.*TensorDataset\(x, y\)"),
        ("lazy", r"Lazy has no rows yet\. Give data\.collect\(\)"),
    ],
)
def test_containers_that_are_no_datasets(kind: str, said: str) -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4)
    given: Any = {"columns": {"x": x, "y": y}, "pair": (x, y)}.get(kind)
    if kind == "splits":
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "y": [0, 1]})
        given = datasets.DatasetDict({"train": rows, "test": rows})
    if kind == "lazy":
        given = type("Lazy", (), {"collect": lambda self: None, "__getitem__": lambda self, key: None})()
    with pytest.raises(DataError, match=said):
        open_data(given, seed=0)
