"""What capture, planning and training refuse: the message has the place, the numbers and the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.capture import Capture, capture
from raypipe.errors import CaptureError, StageError
from raypipe.testing import reference
from tests import nets
from tests.exactness import Shape, captured, config_of, programs, train_stages
from tests.models import CASES, Case

X, Y = CASES["mlp"].data(4)[:4]


def captured_here(model: nn.Module, loss_fn: Any = functional.cross_entropy) -> Capture:
    return capture(model, (X, Y), (0, 1), loss_fn)


def trainer(model: nn.Module, loss_fn: Any = functional.cross_entropy, data: Any = None, **config: Any) -> Any:
    settings = PipelineConfig(**{"num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, **config})
    data = CASES["mlp"].data(16) if data is None else data
    return PipelineTrainer(model, loss_fn=loss_fn, optimizer=sgd, train_data=data, pipeline=settings)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


class Custom(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nets.Double.apply(super().forward(x))


class HookInside(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x.register_hook(lambda gradient: 2 * gradient)
        return x


class Inferring(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            more = self.layers[0](x)
        return super().forward(x) + more[:, :3]


class Freezing(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0].weight.requires_grad_(False)
        return super().forward(x)


def hooked() -> nn.Module:
    model = nets.Mlp()
    model.layers[1].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def hooked_module() -> nn.Module:
    model = nets.Mlp()
    model.layers[2].register_full_backward_hook(lambda *_: None)
    return model


class View(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(4, -1))


class Time(nets.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.lstm(x[:, None].expand(-1, 5, -1))[0][:, -1])


class Generator(nets.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(6, generator=self.own))


class Seeded(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(6, generator=torch.Generator().manual_seed(0)))


ONE_SIZE = r"takes one number of samples only.*x.shape.0., -1.*batch_first=True"


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Custom(), r"custom autograd function tests\.nets\.Double, whose backward tracing would lose.*nn\.Sequential"),
        (HookInside(), r"forward registers a gradient hook on a tensor.*drop the hook"),
        (nn.Sequential(nn.Linear(6, 3), Pair()), r"Child '1' \(Pair\) of the nn\.Sequential returns tuple"),
        (View(), ONE_SIZE),
        (Time(), ONE_SIZE),
        (Generator(), r"is not a tensor, and stages are given tensors only.*without generator="),
        (nn.Sequential(Generator(), nn.Linear(3, 3)), r"changes model\.0\.own with every call"),
        (Seeded(), r"is not a tensor, and stages are given tensors only.*without generator="),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_would_be_lost_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        captured_here(model)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (hooked, r"parameter 'layers\.1\.weight' has a gradient hook.*remove it"),
        (hooked_module, r"module 'layers\.2' has a backward hook.*remove it"),
    ],
)
def test_hooks_that_no_stage_would_call_are_refused(model: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        trainer(model()).plan()


def test_tracing_leaves_torch_as_it_was() -> None:
    before = (torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook)
    model = Custom()
    with pytest.raises(CaptureError):
        captured_here(model)
    assert (torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook) == before
    assert model.training
    assert "forward" not in vars(model)


def test_a_model_without_loss_needs_a_loss_fn() -> None:
    with pytest.raises(CaptureError, match=r"Mlp returned a tensor of shape \(.*3\)\. Pass loss_fn="):
        capture(nets.Mlp(), (X,), (0,), None)
    with pytest.raises(CaptureError, match="ManyOutputs returned a dict of 'logits', 'hidden'"):
        capture(nets.ManyOutputs(), (X,), (0,), None)


def test_nothing_to_train() -> None:
    made = captured_here(nets.frozen(nets.sequential(), ""))
    with pytest.raises(CaptureError, match=r"nothing to train.*requires_grad=True"):
        made.programs((2,))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
def test_a_nan_stops_the_run_before_it_does_harm(stages: int) -> None:
    """The bad sample comes in step 1 or later; the parameters are those before its step, on every stage."""
    inputs, targets = CASES["mlp"].data(16).tensors
    inputs = inputs.clone()
    inputs[3, 0] = float("nan")
    data = torch.utils.data.TensorDataset(inputs, targets)
    found = Case("bad", nets.Mlp, lambda count: data, functional.cross_entropy)
    source = trainer(nets.sequential(), data=data)._prepared().sources["train"]
    bad = next(step for step in range(2) if source.read(0, 8 * step, 8, (0,))[0].isnan().any())
    held: dict[str, torch.Tensor] = {}

    def make(named: Any) -> torch.optim.Optimizer:
        held.update(named)
        return sgd(named)

    made, shape = captured("mlp")[1], Shape(16, 8, 4)
    stages_of = programs("mlp", stages)
    with pytest.raises(StageError, match=rf"Step {bad}: the loss is nan.*parameters are those after {bad} steps"):
        train_stages(found, stages_of, made.parameters, config_of(shape, stages), shape, make, 2)  # type: ignore[arg-type]
    model = captured("mlp")[0]
    if bad:
        wanted = reference(
            model, optimizer=sgd, train_data=data, loss_fn=found.loss_fn, pipeline=config_of(shape), num_steps=bad
        ).parameters
    else:
        wanted = dict(model.named_parameters())
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


class Assigning(nets.Mlp):
    """Assigns to the buffer of a module inside, which torch.export forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0].calls = self.layers[0].calls + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Inferring, r"on micro-batch 1 of 2 .*the gradient of 'layers\.0\.\w+' is different by up to"),
        (Freezing, r"on micro-batch 1 of 2 .*the gradient of 'layers\.0\.weight' is different by up to"),
        (
            Assigning,
            r"on micro-batch 1 of 2 .*the buffer 'layers\.0\.calls' becomes 1 in the module and 0 in the stages",
        ),
    ],
)
def test_what_a_trace_loses_is_refused_before_the_first_step(model: type[nn.Module], said: str) -> None:
    made = model()
    with pytest.raises(CaptureError, match=said):
        trainer(made).fit(num_steps=1, local=True, progress=False)
    assert all(not buffer.any() for buffer in made.buffers())
