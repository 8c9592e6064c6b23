"""Runs on data as it lies around: DataLoaders, ragged datasets of Hugging Face, packed documents; exact, resumable."""

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
from raypipe.data import Packed, Pad
from raypipe.errors import ConfigError
from raypipe.testing import reference

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
