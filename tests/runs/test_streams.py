"""Runs on streams: the bits of plain PyTorch on the same items; a run that goes on is the one that never stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data import Stream
from raypipe.engine.data.stream_source import StreamSource
from raypipe.errors import ConfigError
from tests.engine.data.test_stream import Numbers, Resumable
from tests.exactness import same_bits

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

PULLED: list[int] = []


class Pairs(Numbers):
    """(input, target), the input drawn at random."""

    def __iter__(self) -> Any:
        for item in super().__iter__():
            PULLED.append(1)
            yield torch.cat([item["x"].float(), item["drawn"]]), item["x"][1] % 3


class ResumablePairs(Pairs, Resumable):
    """The same; its state says where it is."""

    def __iter__(self) -> Any:
        for item in Numbers.__iter__(self):
            self.at += 1
            PULLED.append(1)
            yield torch.cat([item["x"].float(), item["drawn"]]), item["x"][1] % 3


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def trainer(folder: Path, name: str, data: Any, config: dict[str, Any] | None = None, **more: Any) -> PipelineTrainer:
    settings: dict[str, Any] = {
        "num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters", "seed": 3,
        "loss_reduction": "mean",
    } | (config or {})  # fmt: skip
    return PipelineTrainer(
        model(), loss_fn=functional.cross_entropy, optimizer=sgd, train_data=data,
        pipeline=PipelineConfig(**settings), run_config=SimpleNamespace(name=name, storage_path=str(folder)), **more,
    )  # fmt: skip


def fit(folder: Path, name: str, data: Any, steps: int, *given: Any, **more: Any) -> Any:
    return trainer(folder, name, data, *given, **more).fit(num_steps=steps, local=True, progress=False)


def test_a_stream_trains_as_in_plain_pytorch(tmp_path: Path) -> None:
    result = fit(tmp_path, "run", Pairs(20), 5)
    plain, source = model(), StreamSource(Pairs(20), seed=3)
    optimizer = sgd(plain.named_parameters())
    for step in range(5):
        x, y = source.read(0, 8 * step, 8, (0, 1))
        optimizer.zero_grad()
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (functional.cross_entropy(plain(a), b) / 4).backward()
        optimizer.step()
    found = load_state_dict(result.checkpoint)
    assert [name for name, value in plain.state_dict().items() if not same_bits(found[name], value)] == []


@pytest.mark.parametrize("config", [{}, {"schedule": "2bw", "checkpoint_interval_steps": 9}])
@pytest.mark.parametrize(("data", "most"), [(Pairs(20), 90), (ResumablePairs(20), 60), (Stream(Pairs(20), 30), 90)])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    data: Any, most: int, config: dict[str, Any], tmp_path: Path
) -> None:
    whole = fit(tmp_path, "whole", data, 12, config)
    fit(tmp_path, "parts", data, 9, config)
    (marked,) = (tmp_path / "parts" / "checkpoints" / "step_0000009").glob("stage_0.stream.json")
    assert marked.is_file()
    made = trainer(tmp_path, "parts", data, config)
    made.plan()
    PULLED.clear()
    parts = made.fit(num_steps=12, local=True, progress=False)
    assert len(PULLED) <= most, "two stages have 24 new items each; passes before are not read again"
    assert [r.loss for r in parts.records] == [r.loss for r in whole.records]
    ours, theirs = load_state_dict(parts.checkpoint), load_state_dict(whole.checkpoint)
    assert [name for name in theirs if not same_bits(ours[name], theirs[name])] == []


def test_an_evaluation_takes_the_first_samples_each_time(tmp_path: Path) -> None:
    evaluated = Stream(Pairs(10), num_samples=10)
    result = fit(tmp_path, "run", Pairs(20), 4, {"eval_interval_steps": 2}, eval_data=evaluated)
    trained = model()
    trained.load_state_dict(load_state_dict(result.checkpoint))
    x, y = StreamSource(evaluated, seed=3).read(0, 0, 10, (0, 1))
    with torch.no_grad():
        wanted = float(functional.cross_entropy(trained(x), y))
    assert result.metrics["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert [bool(record.evaluation) for record in result.records] == [False, True] * 2


def test_epochs_of_a_stream_need_a_number_of_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_epochs=2 is not possible: train_data is a stream.*Stream\(data"):
        trainer(tmp_path, "run", Pairs(20)).fit(num_epochs=2, local=True, progress=False)
    result = trainer(tmp_path, "run", Stream(Pairs(20), 12)).fit(num_epochs=2, local=True, progress=False)
    assert [record.samples for record in result.records] == [8, 4, 8, 4]


def test_streams_of_hugging_face_go_on_with_and_without_a_buffer(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def numbers(shard: list[int]) -> Any:
        for start in shard:
            for number in range(start, start + 10):
                yield {"x": [float(number), 1.0, 0.5], "y": number % 3}

    plain = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shard": [0, 10, 20]})
    rows = datasets.Dataset.from_list([{"x": [float(n), 1.0, 0.5], "y": n % 3} for n in range(30)])
    tables = rows.to_iterable_dataset(num_shards=3)  # its buffer gives many items at once, after which it is refilled
    cases = {"plain": plain, "buffer": plain.shuffle(seed=1, buffer_size=5), "tables": tables}
    cases |= {"buffered tables": tables.shuffle(seed=1, buffer_size=10)}
    both = [plain, tables.shuffle(seed=1, buffer_size=10)]
    cases |= {"interleaved": datasets.interleave_datasets(both, probabilities=[0.3, 0.7], seed=1)}
    for name, data in cases.items():
        saves = name in ("plain", "tables")
        assert StreamSource(data, seed=3)._saves is saves
        whole = fit(tmp_path, f"whole-{name}", data, 7)
        fit(tmp_path, name, data, 5)
        parts = fit(tmp_path, name, data, 7)
        assert [r.loss for r in parts.records] == [r.loss for r in whole.records]


class Counted(Pairs):
    def __len__(self) -> int:
        return 20


def test_a_torch_stream_that_says_its_length_is_a_stream(tmp_path: Path) -> None:
    found = fit(tmp_path, "counted", Counted(20), 4)
    assert [r.loss for r in found.records] == [r.loss for r in fit(tmp_path, "pairs", Pairs(20), 4).records]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.rand(3), torch.tensor(1)


def test_a_stream_without_an_end_is_one_pass(tmp_path: Path) -> None:
    whole = fit(tmp_path, "whole", Endless(), 6)
    fit(tmp_path, "parts", Endless(), 4)
    assert [r.loss for r in fit(tmp_path, "parts", Endless(), 6).records] == [r.loss for r in whole.records]
