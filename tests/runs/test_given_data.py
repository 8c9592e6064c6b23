"""Datasets, loaders and streams of every kind train as in plain PyTorch, and resume in the same order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data import Packed, Pad, Stream
from raypipe.data.stream_source import StreamSource
from raypipe.engine.stage.feed import token_column
from raypipe.errors import ConfigError
from raypipe.testing import reference
from tests.data.test_stream import Numbers, Resumable
from tests.exactness import same_bits

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

X, Y = torch.randn(20, 6), torch.randint(0, 3, (20,))
SETTINGS: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "partitioner": "parameters"}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def noisy(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([x for x, _ in items])
    return x + 0.1 * torch.randn(x.shape), torch.stack([y for _, y in items])


class Words(nn.Module):
    """A language model that returns its own loss over labels other than -100."""

    def __init__(self, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.head(torch.relu(self.mix(x)))
        loss = functional.cross_entropy(logits[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def trainer(folder: Path, name: str, made: nn.Module, data: Any, size: Any = "auto", **more: Any) -> PipelineTrainer:
    config = PipelineConfig(**SETTINGS, minibatch_size=size)
    place = SimpleNamespace(name=name, storage_path=str(folder))
    return PipelineTrainer(made, optimizer=sgd, train_data=data, pipeline=config, run_config=place, **more)


def fit(folder: Path, name: str, made: nn.Module, data: Any, steps: int, size: Any = "auto", **more: Any) -> Any:
    return trainer(folder, name, made, data, size, **more).fit(num_steps=steps, local=True, progress=False)


def check_same(
    found: Any, model: nn.Module, data: Any, size: int, steps: int, within: float = 0.0, **more: Any
) -> None:
    """The run is plain PyTorch on the same batches: losses to the bit, parameters too unless ``within`` is given."""
    config = PipelineConfig(**SETTINGS, minibatch_size=size)
    plain = reference(model, optimizer=sgd, train_data=data, num_steps=steps, pipeline=config, **more)
    assert [r.loss for r in found.records] == list(plain.losses)
    ours = load_state_dict(found.checkpoint)
    if within:
        torch.testing.assert_close(ours, dict(plain.parameters), rtol=0.0, atol=within)
    else:
        assert all(torch.equal(ours[name], value) for name, value in plain.parameters.items())


def test_a_loader_with_random_collating_is_exact_and_goes_on_where_it_was(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, collate_fn=noisy)
    more: dict[str, Any] = {"loss_fn": functional.cross_entropy}
    whole = fit(tmp_path, "whole", model(), loader, 7, **more)
    assert [record.samples for record in whole.records] == [8, 8, 4, 8, 8, 4, 8]
    check_same(whole, model(), TensorDataset(X, Y), 8, 7, collate_fn=noisy, **more)
    fit(tmp_path, "parts", model(), loader, 4, **more)
    parts = fit(tmp_path, "parts", model(), loader, 7, **more)
    assert [r.loss for r in parts.records] == [r.loss for r in whole.records]
    notes = trainer(tmp_path, "notes", model(), loader, **more).plan().notes
    assert any("shuffled in raypipe's own order" in note for note in notes)
    with pytest.raises(ConfigError, match="batch_size=8, but minibatch_size=4"):
        trainer(tmp_path, "other", model(), loader, 4, **more)


def test_a_ragged_dataset_of_hugging_face_is_padded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1 + (n * k) % 31 for k in range(3 + n % 9)], "text": f"row {n}"} for n in range(24)]
    data = datasets.Dataset.from_list(rows)
    pad = Pad(12, labels="input_ids")
    torch.manual_seed(0)
    made = Words()
    result = fit(tmp_path, "run", made, data, 7, 8, loss_fn=None, collate_fn=pad)
    check_same(result, made, data, 8, 7, loss_fn=None, collate_fn=pad)
    again = trainer(tmp_path, "run", made, data, 8, loss_fn=None, collate_fn=pad)
    assert again.evaluate(data=data, local=True)["samples"] == 24


def test_packed_documents_need_no_padding(tmp_path: Path) -> None:
    documents = [[1 + (n * k) % 31 for k in range(3 + n % 9)] for n in range(40)]
    data = Packed(documents, 10, separator=0, labels="next")
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    more: dict[str, Any] = {"loss_fn": tokens_loss}
    check_same(fit(tmp_path, "run", made, data, 4, 8, **more), made, data, 8, 4, **more)


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
    more: dict[str, Any] = {"loss_fn": None}
    found = fit(tmp_path, "run", made.train(), data, 2, 8, **more)
    # With sdpa, parameters were 4e-9 from plain PyTorch's where other models had run before; why is not known yet.
    check_same(found, made, data, 8, 2, within=0.0 if attention == "eager" else 1e-7, **more)


def tokens_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


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


def sgd_of_streams(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def model_of_streams() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def trainer_of_streams(
    folder: Path, name: str, data: Any, config: dict[str, Any] | None = None, **more: Any
) -> PipelineTrainer:
    settings: dict[str, Any] = {
        "num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters", "seed": 3,
        "loss_reduction": "mean",
    } | (config or {})  # fmt: skip
    return PipelineTrainer(
        model_of_streams(), loss_fn=functional.cross_entropy, optimizer=sgd_of_streams, train_data=data,
        pipeline=PipelineConfig(**settings), run_config=SimpleNamespace(name=name, storage_path=str(folder)), **more,
    )  # fmt: skip


def fit_of_streams(folder: Path, name: str, data: Any, steps: int, *given: Any, **more: Any) -> Any:
    return trainer_of_streams(folder, name, data, *given, **more).fit(num_steps=steps, local=True, progress=False)


def test_a_stream_trains_as_in_plain_pytorch(tmp_path: Path) -> None:
    result = fit_of_streams(tmp_path, "run", Pairs(20), 5)
    plain, source = model_of_streams(), StreamSource(Pairs(20), seed=3)
    optimizer = sgd_of_streams(plain.named_parameters())
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
    ours, theirs = load_state_dict(parts.checkpoint), load_state_dict(whole.checkpoint)
    assert [name for name in theirs if not same_bits(ours[name], theirs[name])] == []


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


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.rand(3), torch.tensor(1)


def test_a_stream_without_an_end_is_one_pass(tmp_path: Path) -> None:
    whole = fit_of_streams(tmp_path, "whole", Endless(), 6)
    fit_of_streams(tmp_path, "parts", Endless(), 4)
    assert [r.loss for r in fit_of_streams(tmp_path, "parts", Endless(), 6).records] == [r.loss for r in whole.records]


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("names", "example", "column"),
    [
        (("labels", "input_ids"), {"labels": IDS, "input_ids": IDS}, "input_ids"),
        (("targets", "tokens"), {0: IDS.byte(), 1: IDS.byte()}, 1),
        ((0, 1), {0: IDS, 1: IDS[:, 0]}, 0),
        ((0, 1), {0: IDS.byte(), 1: IDS[:, 0]}, None),  # pixels, perhaps
        ((0, 1), {0: IDS.float(), 1: IDS}, None),
        ((0, 1), {0: IDS[:, :1], 1: IDS}, None),
        (("x", "labels"), {"x": IDS, "labels": IDS}, None),
    ],
)
def test_which_column_holds_tokens(names: Any, example: Any, column: Any) -> None:
    assert token_column(names, example) == column


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_a_step_has_the_tokens_of_its_own_mini_batch(schedule: str, tmp_path: Path) -> None:
    """The last mini-batch of an epoch is short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randint(0, 16, (20, 5)), torch.randint(0, 3, (20,)))
    made = PipelineTrainer(
        model, loss_fn=functional.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=data, run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=4, schedule=schedule, partitioner="parameters",
            loss_reduction="mean",
        ),
    )  # fmt: skip
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
