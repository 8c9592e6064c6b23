"""What capture, planning and training refuse: the message has the place, the numbers and the cure."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import Capture, capture
from raypipe.capture.guards import nothing_lost
from raypipe.engine.torch_settings import torch_settings
from raypipe.errors import CaptureError
from tests import nets
from tests.models import CASES
from tests.trainers import trainer_of

X, Y = CASES["mlp"].data(4)[:4]


def captured_here(model: nn.Module, loss_fn: Any = functional.cross_entropy) -> Capture:
    return capture(model, (X, Y), (0, 1), loss_fn)


class Jittered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: Any) -> torch.Tensor:
        return x * len(scale)


class Custom(nets.Mlp):
    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.function, self.arguments = function, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(super().forward(x), *self.arguments)


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


class Generator(nets.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(6, generator=self.own))


class Seeded(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(6, generator=torch.Generator().manual_seed(0)))


class Replaced(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = functional.normalize(self.weight.data)
        return super().forward(x)


class Rounded(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x.data = x.data.round()
        return x


class Widened(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[1].double()
        return super().forward(x)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Custom(Jittered), r"custom autograd function \S+\.Jittered at \S+:\d+, which draws random .*nn\.Sequential"),
        (Custom(DoubledInPlace), r"custom autograd function \S+\.DoubledInPlace.*, which changes its input in place"),
        (Custom(Scaled, {"a": 1}), r"custom autograd function \S+\.Scaled at .*, which takes an argument of type dict"),
        (HookInside(), r"forward registers a gradient hook on a tensor.*drop the hook"),
        (nn.Sequential(nn.Linear(6, 3), Pair()), r"Child '1' \(Pair\) of the nn\.Sequential returns tuple"),
        (Generator(), r"is not a tensor, and stages are given tensors only.*without generator="),
        (nn.Sequential(Generator(), nn.Linear(3, 3)), r"changes model\.0\.own with every call"),
        (Replaced(6, 3), r"replaces the values of a parameter .* \.data at \S+:\d+.*or in the optimizer's step"),
        (Rounded(6, 3), r"replaces the values of a tensor .* \.data at \S+:\d+.*x = x \+ \(new - x\)\.detach\(\)"),
        (Widened(), r"forward converts a Linear to another dtype or device at \S+:\d+.*Convert it before the run"),
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
        trainer_of(model(), train_data=CASES["mlp"].data(16)).plan()


def test_tracing_leaves_torch_as_it_was() -> None:
    before = (torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook, torch.Tensor.data)
    model = Custom(Jittered)
    with pytest.raises(CaptureError):
        captured_here(model)
    assert (torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook, torch.Tensor.data) == before
    assert model.training
    assert "forward" not in vars(model)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fixed: Any) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def test_a_trace_refuses_nothing_in_other_threads() -> None:
    """Stages of a local run are threads of the process that traces."""
    x = torch.ones(2, requires_grad=True)
    calls = (
        lambda: Same.apply(x, object()),  # an argument that no graph holds
        lambda: x.register_hook(lambda gradient: gradient),
        lambda: torch.autocast("cuda", torch.float16),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH).__enter__(),
    )
    settings = torch_settings()
    with ThreadPoolExecutor(1) as stages, nothing_lost():
        for call in calls:
            stages.submit(call).result(30)
        settings.take()
        for call in calls[:2]:
            with pytest.raises(CaptureError):
                call()


def test_a_model_without_loss_needs_a_loss_fn() -> None:
    with pytest.raises(CaptureError, match=r"Mlp returned a tensor of shape \(.*3\)\. Pass loss_fn="):
        capture(nets.Mlp(), (X,), (0,), None)
    with pytest.raises(CaptureError, match="ManyOutputs returned a dict of 'logits', 'hidden'"):
        capture(nets.ManyOutputs(), (X,), (0,), None)


class Learned(nn.Linear):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(output), target)


def test_a_loss_with_parameters_is_refused_with_the_way_to_train_it() -> None:
    with pytest.raises(CaptureError, match=r"Learned, has parameters of its own \('weight'\).*self\.loss = Learned"):
        captured_here(nets.Mlp(), Learned(3, 3))


def test_nothing_to_train() -> None:
    made = captured_here(nets.frozen(nets.sequential(), ""))
    with pytest.raises(CaptureError, match=r"nothing to train.*requires_grad=True"):
        made.programs((2,))


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
        trainer_of(made, train_data=CASES["mlp"].data(16)).fit(num_steps=1, local=True, progress=False)
    assert all(not buffer.any() for buffer in made.buffers())
