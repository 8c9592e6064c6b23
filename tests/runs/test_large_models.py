"""Models whose weights only the workers hold: the same run, to the bit, as one that was given the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raypipe
from tests.hugging_face import hugging_face

pytestmark = pytest.mark.engine


def trained(
    model: Any, folder: Path, *, weights: Path | None, on: str, case: Any, **fields: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(state after two steps, losses)."""
    pipeline = raypipe.PipelineConfig(
        num_stages=2, minibatch_size=4, num_microbatches=2, partitioner="parameters", weights_on=on, **fields
    )
    trainer = raypipe.PipelineTrainer(
        model, optimizer=partial(torch.optim.AdamW, lr=1e-2), loss_fn=case.loss_fn, train_data=case.data(8),
        pipeline=pipeline, init_from=weights,
        run_config=SimpleNamespace(name=on, storage_path=str(folder)),
    )  # fmt: skip
    result = trainer.fit(num_steps=2, local=True, progress=False)
    return raypipe.load_state_dict(result.path), list(result.metrics_dataframe["loss"])


@pytest.mark.parametrize(("name", "fields"), [("gpt2", {}), ("llama", {"precision": "bf16"})])
def test_shards_and_the_whole_model_train_alike(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    case = hugging_face(name)
    torch.manual_seed(1)
    case.build().save_pretrained(tmp_path / "weights", max_shard_size="10KB")
    assert (tmp_path / "weights" / "model.safetensors.index.json").exists()
    run = partial(trained, case.build, tmp_path, weights=tmp_path / "weights", case=case, **fields)
    whole, parts = run(on="client"), run(on="workers")
    assert whole[1] == parts[1]
    assert whole[0].keys() == parts[0].keys()
    assert all(torch.equal(whole[0][key], parts[0][key]) for key in whole[0])
