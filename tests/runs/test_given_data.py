"""Datasets, loaders and streams of every kind train as in plain PyTorch, and resume in the same order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data import Packed, Stream
from raypipe.data.stream_source import StreamSource
from raypipe.errors import ConfigError
from raypipe.testing import reference
from tests.data.test_stream import Numbers, Resumable
from tests.exactness import same_bits, unequal
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

X, Y = torch.randn(20, 3), torch.randint(0, 3, (20,))


def sgd_of_streams(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def model_of_streams() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def config_of(**more: Any) -> PipelineConfig:
    usual: dict[str, Any] = {"num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters"}
    return PipelineConfig(**usual | {"seed": 3, "loss_reduction": "mean"} | more)


def trainer_of_streams(
    folder: Path, name: str, data: Any, config: dict[str, Any] | None = None, model: Any = None, **more: Any
) -> PipelineTrainer:
    given = {"loss_fn": functional.cross_entropy, "optimizer": sgd_of_streams} | more
    place = SimpleNamespace(name=name, storage_path=str(folder))
    pipeline = config_of(**(config or {}))
    return PipelineTrainer(model or model_of_streams(), train_data=data, pipeline=pipeline, run_config=place, **given)


def fit_of_streams(folder: Path, name: str, data: Any, steps: int, *given: Any, **more: Any) -> Any:
    return trainer_of_streams(folder, name, data, *given, **more).fit(num_steps=steps, local=True, progress=False)


def noisy(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([x for x, _ in items])
    return x + 0.1 * torch.randn(x.shape), torch.stack([y for _, y in items])


def test_a_loader_with_random_collating_is_exact_and_goes_on_where_it_was(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, collate_fn=noisy)
    whole = fit_of_streams(tmp_path, "whole", loader, 7)
    assert [record.samples for record in whole.records] == [8, 8, 4, 8, 8, 4, 8]
    plain = reference(
        model_of_streams(), optimizer=sgd_of_streams, train_data=TensorDataset(X, Y), num_steps=7,
        pipeline=config_of(), loss_fn=functional.cross_entropy, collate_fn=noisy,
    )  # fmt: skip
    assert [r.loss for r in whole.records] == list(plain.losses)
    trained = load_state_dict(whole.checkpoint)
    assert all(same_bits(trained[name], value) for name, value in plain.parameters.items())
    fit_of_streams(tmp_path, "parts", loader, 4)
    parts = fit_of_streams(tmp_path, "parts", loader, 7)
    assert [r.loss for r in parts.records] == [r.loss for r in whole.records]
    notes = trainer_of_streams(tmp_path, "notes", loader).plan().notes
    assert any("shuffled in raypipe's own order" in note for note in notes)
    with pytest.raises(ConfigError, match="batch_size=8, but minibatch_size=4"):
        trainer_of_streams(tmp_path, "other", loader, {"minibatch_size": 4})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_that_stand_apart_do_not_see_each_other(attention: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.hugging_face import hugging_face

    torch.manual_seed(0)
    made = hugging_face("llama").model()
    made.config._attn_implementation = attention
    documents = [[1 + (n * k) % 31 for k in range(3 + n % 9)] for n in range(40)]
    data = Packed(documents, 10, separator=0, apart=True)
    block = {name: value[None] for name, value in data[0].items()}
    border = block["position_ids"][0].tolist().index(0, 1)
    changed = block | {"input_ids": block["input_ids"].clone()}
    changed["input_ids"][0, :border] = 30
    with torch.no_grad():
        one, other = made.eval()(**block).logits[0], made(**changed).logits[0]
    assert not torch.equal(one[:border], other[:border])
    assert torch.equal(one[border:], other[border:]), "what stands before the border is not seen behind it"
    counts = {"loss_reduction": "auto"}
    found = fit_of_streams(tmp_path, "run", data, 2, counts, made.train(), loss_fn=None)
    plain = reference(
        made, optimizer=sgd_of_streams, train_data=data, num_steps=2, pipeline=config_of(**counts), loss_fn=None
    )
    assert [r.loss for r in found.records] == list(plain.losses)
    # With sdpa, parameters were 4e-9 from plain PyTorch's where other models had run before; why is not known yet.
    within = 0.0 if attention == "eager" else 1e-7
    torch.testing.assert_close(load_state_dict(found.checkpoint), dict(plain.parameters), rtol=0.0, atol=within)


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


@pytest.mark.parametrize("config", [{}, {"schedule": "2bw", "checkpoint_interval_steps": 9}])
@pytest.mark.parametrize(("data", "most"), [(Pairs(20), 90), (ResumablePairs(20), 60), (Stream(Pairs(20), 30), 90)])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    data: Any, most: int, config: dict[str, Any], tmp_path: Path
) -> None:
    whole = fit_of_streams(tmp_path, "whole", data, 12, config)
    fit_of_streams(tmp_path, "parts", data, 9, config)
    (marked,) = (tmp_path / "parts" / "checkpoints" / "step_0000009").glob("stage_0.stream.json")
    assert marked.is_file()
    made = trainer_of_streams(tmp_path, "parts", data, config)
    made.plan()
    PULLED.clear()
    parts = made.fit(num_steps=12, local=True, progress=False)
    assert len(PULLED) <= most, "two stages have 24 new items each; passes before are not read again"
    assert [r.loss for r in parts.records] == [r.loss for r in whole.records]
    assert unequal(parts.checkpoint, whole.checkpoint) == []


def test_an_evaluation_takes_the_first_samples_each_time(tmp_path: Path) -> None:
    evaluated = Stream(Pairs(10), num_samples=10)
    result = fit_of_streams(tmp_path, "run", Pairs(20), 4, {"eval_interval_steps": 2}, eval_data=evaluated)
    trained = model_of_streams()
    trained.load_state_dict(load_state_dict(result.checkpoint))
    x, y = StreamSource(evaluated, seed=3).read(0, 0, 10, (0, 1))
    with torch.no_grad():
        wanted = float(functional.cross_entropy(trained(x), y))
    assert result.metrics["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert [bool(record.evaluation) for record in result.records] == [False, True] * 2


def test_epochs_of_a_stream_need_a_number_of_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_epochs=2 is not possible: train_data is a stream.*Stream\(data"):
        trainer_of_streams(tmp_path, "run", Pairs(20)).fit(num_epochs=2, local=True, progress=False)
    result = trainer_of_streams(tmp_path, "run", Stream(Pairs(20), 12)).fit(num_epochs=2, local=True, progress=False)
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
        whole = fit_of_streams(tmp_path, f"whole-{name}", data, 7)
        fit_of_streams(tmp_path, name, data, 5)
        parts = fit_of_streams(tmp_path, name, data, 7)
        assert [r.loss for r in parts.records] == [r.loss for r in whole.records]


class Counted(Pairs):
    def __len__(self) -> int:
        return 20


def test_a_torch_stream_that_says_its_length_is_a_stream(tmp_path: Path) -> None:
    found = fit_of_streams(tmp_path, "counted", Counted(20), 4)
    assert [r.loss for r in found.records] == [r.loss for r in fit_of_streams(tmp_path, "pairs", Pairs(20), 4).records]


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_a_step_has_the_tokens_of_its_own_mini_batch(schedule: str, tmp_path: Path) -> None:
    """The last mini-batch of an epoch is short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randint(0, 16, (20, 5)), torch.randint(0, 3, (20,)))
    made = trainer_of(model, tmp_path, train_data=data, schedule=schedule, loss_reduction="mean")
    result = made.fit(num_steps=5, local=True, progress=False)
    assert [(record.samples, record.tokens) for record in result.records] == [
        (8, 40),
        (8, 40),
        (4, 20),
        (8, 40),
        (8, 40),
    ]
    assert result.metrics["tokens_per_s"] == pytest.approx(40 / result.records[-1].seconds)
    assert all(0 < record.goodput <= 1 for record in result.records)
    assert {"lr", "tokens", "goodput"} <= set(result.metrics_dataframe.columns)
