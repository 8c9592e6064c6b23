"""Stages under torch.compile: the bits of stages that are not, where torch's own kernels run, else close to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data.open_data import open_data
from raypipe.engine.device_functions import compiled_stage
from raypipe.engine.stage.randomness import RandomKey
from raypipe.errors import ConfigError, PlanError, StageError
from tests import nets
from tests.exactness import captured, programs, same_bits, unequal
from tests.models import vectors
from tests.trainers import trainer_of

STEPS, SIZE, PARTS = 3, 11, 4
"""Micro-batches of 3, 3, 3 and 2 samples."""


class Wide(nn.Module):
    """One weight is large enough for a hook of its own, one layer's draws may be random, and one counts batches."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(6, 512), nn.Linear(512, 512)
        self.norm, self.last = nn.BatchNorm1d(512), nn.Linear(512, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.wide(functional.gelu(self.first(x)))), inplace=True)
        return self.last(self.dropout(x))


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def made(
    folder: Path, name: str, model: Callable[[], nn.Module] = Wide, scaling_config: Any = None, **pipeline: Any
) -> PipelineTrainer:
    torch.manual_seed(0)
    given = {"minibatch_size": SIZE, "num_microbatches": PARTS, "partitioner": ["last"], "verify": "off"} | pipeline
    return trainer_of(
        model(), folder, name, optimizer=sgd, train_data=vectors(4 * SIZE), scaling_config=scaling_config, **given
    )


def trained(folder: Path, name: str, model: Callable[[], nn.Module] = Wide, **pipeline: Any) -> dict[str, torch.Tensor]:
    result = made(folder, name, model, **pipeline).fit(STEPS, local=True, progress=False)
    return {**load_state_dict(result.checkpoint), "loss": torch.tensor([record.loss for record in result.records])}


@pytest.mark.parametrize(
    "how",
    [{}, {"recompute": "always"}, {"precision": "bf16-autocast"}, {"schedule": "pipedream"}, {"num_replicas": [1, 2]}],
    ids=str,
)
def test_the_traced_order_has_the_bits_of_plain_pytorch(tmp_path: Path, how: dict[str, Any]) -> None:
    wanted = trained(tmp_path, "plain", **how)
    found = trained(tmp_path, "compiled", compile_stages="aot_eager", **how)
    assert unequal(found, wanted) == []


def test_a_stage_that_draws_is_left_as_it_is_and_the_plan_says_so(tmp_path: Path) -> None:
    plan = made(tmp_path, "noted", partial(Wide, 0.2), compile_stages="aot_eager").plan()
    assert "Stage 0 is not compiled: it draws random numbers (dropout)." in plan.notes
    assert any(note.startswith("compile_stages='aot_eager': stages are compiled before") for note in plan.notes)
    wanted = trained(tmp_path, "plain", partial(Wide, 0.2))
    found = trained(tmp_path, "compiled", partial(Wide, 0.2), compile_stages="aot_eager")
    assert unequal(found, wanted) == []


def test_nothing_to_compile_and_split_backwards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"compile_stages='inductor' would have no effect: no stage can be compiled"):
        made(tmp_path, "none", nets.sequential, compile_stages="inductor", partitioner=["2"]).plan()
    for schedule in ("zb-h1", "zb-v"):
        with pytest.raises(ConfigError, match=rf"compile_stages='inductor' is not possible with schedule='{schedule}'"):
            PipelineConfig(compile_stages="inductor", schedule=schedule)


def test_too_many_shapes_are_named_with_the_field() -> None:
    program, tensors = programs("tied-lm", 2)[0], captured("tied-lm")[1]
    function = compiled_stage(program.train, "aot_eager")
    leaves = [tensors.parameters[site.parameter] for site in function.sites]
    held = [tensors.buffers[name] for name in function.buffers]

    def forward(samples: int) -> None:
        function(leaves, held, (), [torch.zeros(samples, 6, dtype=torch.int64)], RandomKey(0, 0, 0))

    words = r"compile_stages='aot_eager': torch.compile failed: FailOnRecompileLimitHit"
    with torch._dynamo.config.patch(recompile_limit=1):  # type: ignore[attr-defined]
        forward(2)
        with pytest.raises(StageError, match=words):
            forward(3)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.gelu(self.norm(self.first(x))))


def test_generated_kernels_have_the_bits_of_the_whole_model_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage is the graph of the model; rounding differs from eager's by a few units in the last place."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    even = {"num_stages": 1, "partitioner": "parameters", "num_microbatches": 2, "minibatch_size": 10}
    found = trained(tmp_path, "compiled", Narrow, compile_stages="inductor", **even)
    torch.manual_seed(0)
    model = Narrow()
    compiled = torch.compile(model, dynamic=False)
    optimizer = sgd(list(model.named_parameters()))
    source = open_data(vectors(4 * SIZE), seed=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            x, y = source.read(0, step * 10 + part * 5, 5, (0, 1))
            (functional.cross_entropy(compiled(x), y) * 0.5).backward()
        optimizer.step()
    eager = trained(tmp_path, "eager", Narrow, **even)
    for name, parameter in model.named_parameters():
        assert same_bits(found[name], parameter.detach())
        torch.testing.assert_close(found[name], eager[name], rtol=1e-5, atol=1e-6)
