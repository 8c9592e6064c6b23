"""A backward has the gradients of autograd; a split one has the same bits, and keeps little between its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raypipe.engine.stage import backward
from raypipe.engine.stage.backward import SplitBackward, gradients, input_gradients
from tests.exactness import same_bits

pytestmark = pytest.mark.slow


class Scaled(nn.Module):
    """addmm with factors, of which autograd has another formula, and products with a weight that is not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight, self.other = (nn.Parameter(torch.randn(s)) for s in ((8,), (8, 8), (8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.addmm(self.bias, x.flatten(0, -2), self.weight, beta=0.5, alpha=2.0)
        return rows.mm(self.other).view_as(x)


class Hooked(nn.Module):
    """Hooks on tensors in between: of a product's result, of what hangs off the path, and of a cast weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale, self.other = (nn.Parameter(torch.randn(s)) for s in ((8, 8), (8,), (8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, scale, other = x @ self.weight, self.scale.tanh(), self.other * 2
        for tensor in (made, scale, other):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * 0.5)
        return (made * scale) @ other


class Foreign(nn.Module):
    """A leaf that is no parameter; nobody asks for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.probe = nn.Linear(8, 8), torch.zeros(8, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x + self.probe.to(x.dtype)) @ torch.ones(8, 8, dtype=x.dtype).requires_grad_()
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            out: torch.Tensor = self.inner(x)
            return out

        out: torch.Tensor = checkpoint(run, x, use_reentrant=False)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.cell(x)[0]
        return out


def rows() -> torch.Tensor:
    return torch.randn(3, 5, 8)


def images() -> torch.Tensor:
    return torch.randn(2, 4, 9, 9)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8, bias=False)), rows),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), rows),
    "scaled": (Scaled, rows),
    "recurrent": (Recurrent, rows),
    "hooked": (Hooked, rows),
    "foreign": (Foreign, rows),
    "checkpointed": (Checkpointed, rows),
    "norms": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.RMSNorm(8)), rows),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4),
            nn.ConvTranspose2d(8, 4, 2, bias=False), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, dilation=2, padding=2),
        ),
        images,
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        lambda: images().to(memory_format=torch.channels_last),
    ),
    "no parameters": (nn.Tanh, rows),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False), rows),
}  # fmt: skip


def forward(net: nn.Module, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[nn.Parameter]]:
    """(input, output, leaves), the same numbers every time."""
    x = drawn.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    return x, net(x), [p for p in net.parameters() if p.requires_grad]


def together(split: SplitBackward) -> list[torch.Tensor | None]:
    """Of the own leaves, each of which may be in one part only."""
    later = split.finish()
    assert all(now is None or after is None for now, after in zip(split.own, later, strict=True))
    return [now if after is None else after for now, after in zip(split.own, later, strict=True)]


def seed_of(y: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, y.numel()).view_as(y)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_halves_make_the_bits_of_one_backward(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    make, draw = NETS[name]
    net, drawn = make().to(dtype), draw().to(dtype)
    x, y, own = forward(net, drawn)
    whole = gradients([y], [seed_of(y)], [x, *own])
    x, y, own = forward(net, drawn)
    split = input_gradients([y], [seed_of(y)], [x], own)
    found = [*split.received, *together(split)]
    assert [same_bits(a, b) for a, b in zip(whole, found, strict=True)] == [True] * len(whole)
    assert [a is None or a.stride() == b.stride() for a, b in zip(whole, found, strict=True)] == [True] * len(whole)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "waits"), [("linear", 2), ("convolution", 7), ("attention", 4)])
def test_products_wait_for_the_second_half(name: str, waits: int) -> None:
    make, draw = NETS[name]
    x, y, own = forward(make(), draw())
    split = input_gradients([y], [seed_of(y)], [x], own)
    assert sum(gradient is not None for gradient in split.finish()) == waits


def test_nothing_but_operands_is_kept_between_the_halves() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            big = x.clone()
            kept.append(weakref.ref(big))
            ctx.save_for_backward(big)  # type: ignore[attr-defined]
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0].sign()  # type: ignore[attr-defined, no-any-return]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(5, 5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.third(Watched.apply(self.second(Watched.apply(self.first(x)))))
            return out

    x, y, own = forward(Net(), rows())
    assert [big() is None for big in kept] == [False, False]
    split = input_gradients([y], [seed_of(y)], [x], own)
    del y
    assert [big() is None for big in kept] == [True, True]
    later = split.finish()
    assert sum(gradient is not None for gradient in later) == 4
    assert not any(gradient is not None and gradient.requires_grad for gradient in (*split.own, *later))


def test_a_checkpoint_is_recomputed_as_often_as_by_one_backward() -> None:
    net = Checkpointed()
    x, y, own = forward(net, rows())
    split = input_gradients([y], [seed_of(y)], [x], own)
    split.finish()
    assert net.runs == 2


def test_an_operand_that_was_changed_meanwhile_is_refused() -> None:
    table, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    x = torch.randn(8, 8, requires_grad=True)
    y = torch.addmm(x, table, weight)
    split = input_gradients([y], [seed_of(y)], [x], [weight])
    table.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        split.finish()


def several(
    roots: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]],
) -> list[list[torch.Tensor | None]]:
    """Whole and split, of roots made from two inputs and two weights."""
    found = []
    for splits in (False, True):
        drawn = torch.Generator().manual_seed(4)
        a, b, v, w = (torch.randn(4, 4, generator=drawn, requires_grad=True) for _ in range(4))
        made = roots(a, b, (v, w))
        seeds = [seed_of(root) for root in made]
        if splits:
            split = input_gradients(made, seeds, [a, b], [v, w])
            found.append([*split.received, *together(split)])
        else:
            found.append(list(gradients(made, seeds, [a, b, v, w])))
    return found


@pytest.mark.parametrize(
    "roots",
    [
        lambda a, b, own: [a @ own[0] + b, (b @ own[1]).tanh()],
        lambda a, b, own: [a @ own[0], own[1].tanh()],  # the second root leads to no input
        lambda a, b, own: [a @ own[0], own[0].tanh()],  # and shares a weight with the first
        lambda a, b, own: [a, b @ own[0]],  # an input that is handed on as it came
        lambda a, b, own: [a @ own[0], own[1]],  # a weight that is handed on
        lambda a, b, own: [(a @ (h := own[0].tanh())), h],  # a gradient that meets another off the path
        lambda a, b, own: [a @ own[0] @ own[0], (b @ own[1]) @ own[0]],
        lambda a, b, own: [a @ own[0] + own[0]],  # a product and a sum meet in one leaf
        lambda a, b, own: [a @ (h := own[0].tanh()) + h.exp() + h],  # and off the path, one behind the other
        lambda a, b, own: [a + (h := own[0].tanh()) + h.exp()],
        lambda a, b, own: [h := own[0] * 3, h.tanh() @ own[1], a + b],  # roots behind each other
        lambda a, b, own: [a.exp()],
        lambda a, b, own: [own[0] @ own[1]],
        lambda a, b, own: [],
    ],
)
def test_roots_of_all_kinds(roots: Callable[..., list[torch.Tensor]]) -> None:
    whole, split = several(roots)
    assert [same_bits(x, y) for x, y in zip(whole, split, strict=True)] == [True] * 4


def test_hooks_of_leaves_run_once_and_what_they_give_counts() -> None:
    for make in (lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False))):
        x, y, own = forward(make(), rows())
        calls: list[int] = []

        def hook(place: int, gradient: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(place)
            return torch.zeros_like(gradient)

        for place, leaf in enumerate(own):
            leaf.register_hook(partial(hook, place))
        split = input_gradients([y], [seed_of(y)], [x], own)
        assert all(gradient is not None and not gradient.any() for gradient in together(split))
        assert sorted(calls) == list(range(len(own)))


@pytest.mark.parametrize("direct", [True, False])
def test_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(backward, "_run", None)
    assert (backward._run is not None) == direct
    x, w, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    seeds = (torch.randn(3, 3), torch.randn(3, 3))
    expected = torch.autograd.grad([(x @ w).relu(), x], [x, w], seeds)
    y = (x @ w).relu()
    found = backward.gradients([y, x], seeds, [x, w, unused])  # x is a relayed input: a root and a leaf
    assert found[2] is None
    assert torch.equal(found[0], expected[0])  # type: ignore[arg-type]
    assert torch.equal(found[1], expected[1])  # type: ignore[arg-type]
    assert w.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        backward.gradients([y], seeds[:1], [w])
