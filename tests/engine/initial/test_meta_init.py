"""Parameters that initialisers make: on a worker, of any stage, the same as anywhere else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.engine.initial.meta_init import ModuleInit, build_on_meta
from raypipe.errors import ConfigError
from tests.hugging_face import hugging_face

pytestmark = pytest.mark.engine


def source_of(make: Callable[[], Any], seed: int = 0) -> tuple[Any, ModuleInit]:
    model, writes = build_on_meta(make, seed)
    return model, ModuleInit.of(model, writes, seed)


class Scale(nn.Module):
    """Sets its parameter in both ways, as norms of torchtitan do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.step = nn.Parameter(torch.zeros(()), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, 1.0, 0.02)
        nn.init.zeros_(self.step)


class Plain(nn.Module):
    """Modules of torch with parameters and buffers, tied weights, initialisers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, padding_idx=3)
        self.norm, self.scale = nn.LayerNorm(8), Scale()
        self.convolution, self.statistics = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.rnn = nn.LSTM(8, 4, batch_first=True)
        self.last = nn.Linear(8, 16, bias=False)
        self.last.weight = self.table.weight
        self.hidden = nn.Linear(8, 8)
        self.register_buffer("angles", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("drawn", torch.randn(3))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.orthogonal_(self.hidden.weight)
        nn.init.constant_(self.hidden.bias, 0.5)


class Applied(nn.Module):
    """Initialises each module by one function, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            module.bias.data.zero_()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain, "applied": Applied, "gpt2": hugging_face("gpt2").build, "llama": hugging_face("llama").build,
}  # fmt: skip


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return request.param  # type: ignore[no-any-return]


def test_a_model_has_shapes_ties_and_the_constructors_buffers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    built, _ = source_of(make)
    assert torch.equal(torch.rand(2), expected)  # the caller's generator is as it was
    real = make()
    for (name, bare), (same, own) in zip(
        built.named_parameters(remove_duplicate=False), real.named_parameters(remove_duplicate=False), strict=True
    ):
        assert name == same
        assert bare.is_meta, name
        assert (bare.shape, bare.stride(), bare.dtype, bare.requires_grad) == (
            own.shape, own.stride(), own.dtype, own.requires_grad,
        ), name  # fmt: skip
    for (name, buffer), own in zip(built.named_buffers(), real.buffers(), strict=True):
        assert name == "drawn" or torch.equal(buffer, own), name
    assert torch.equal(
        dict(source_of(make)[0].named_buffers()).get("drawn", expected), getattr(built, "drawn", expected)
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_hold_equal_parameters_however_many_there_are(make: Callable[[], nn.Module], stages: int) -> None:
    """Each stage is a worker of its own, in another order, after other draws."""
    built, source = source_of(make, seed=4)
    names = list(dict(built.named_parameters()))
    assert list(source.names) == names
    whole = dict(source.read(names))
    parts: dict[str, torch.Tensor] = {}
    for stage in range(stages):
        worker = pickle.loads(pickle.dumps(source))
        torch.rand(3)
        parts.update(worker.read(names[stage::stages][::-1]))
    assert parts.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor), name
        assert (tensor.shape, tensor.dtype) == (source.info(name).shape, source.info(name).dtype)
        assert not tensor.isnan().any()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    other = dict(source_of(make, seed=5)[1].read(names))
    assert any(not torch.equal(other[name], whole[name]) for name in names)
    assert all(p.is_meta for p in source.model.parameters())


def test_parameters_are_distributed_as_the_constructor_makes_them(make: Callable[[], nn.Module]) -> None:
    _, source = source_of(make)
    made = dict(source.read(source.names))
    torch.manual_seed(0)
    for name, own in make().named_parameters():
        if own.unique().numel() == 1:
            assert name == "scale.weight" or torch.equal(made[name], own), name
        else:
            assert torch.isclose(made[name].std(), own.std(), rtol=0.6), name


def test_initialisers_of_modules_that_contain_others_are_called() -> None:
    made = dict(source_of(Plain)[1].read(source_of(Plain)[1].names))
    assert torch.allclose(made["hidden.weight"] @ made["hidden.weight"].T, torch.eye(8), atol=1e-5)
    assert made["hidden.bias"].unique().tolist() == [0.5]
    assert not made["attention.self_attn.out_proj.bias"].any()
    assert made["table.weight"][3].unique().tolist() == [0]
    assert 0.7 < made["table.weight"].std() < 1.3
    gpt2 = dict(
        source_of(MODELS["gpt2"])[1].read(["transformer.h.0.mlp.c_proj.weight", "transformer.h.0.mlp.c_fc.weight"])
    )
    scaled, plain = (x.std() for x in gpt2.values())
    assert torch.isclose(scaled, plain / 2, rtol=0.2)  # 0.02 over the root of twice the layers


class Replaced(Applied):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].bias = nn.Parameter(torch.ones(4))


class SetLater(Applied):
    def __init__(self) -> None:
        super().__init__()
        nn.init.trunc_normal_(self.blocks[0].weight, std=0.01)


class SetAndCopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(4, 4)
        with torch.no_grad():
            block.bias[1] = 2.0
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.arange(4.0))


class Partly(Bare):
    def reset_parameters(self) -> None:
        self.prior.data[:2] = 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Bare, r"no initialiser sets all of 'prior', a parameter of Bare\. Give Bare a method reset_parameters\(\)"),
        (Replaced, r"the constructor sets 'blocks\.2\.bias' at .*test_meta_init\.py:\d+, and workers do not run"),
        (SetLater, r"the constructor sets 'blocks\.0\.weight' at .*_init_weights\(module\)"),
        (SetAndCopied, r"the constructor sets 'blocks\.0\.bias' at"),
    ],
)
def test_what_no_initialiser_makes_is_refused_by_name(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=f"weights_on='workers': {words}.*weights_on='client'"):
        source_of(make)
    build_on_meta(make, 0)  # files may have the weights


def test_a_parameter_of_which_a_part_stays_unset_is_refused_by_its_worker() -> None:
    with pytest.raises(ConfigError, match=r"no initialiser sets all of 'prior'"):
        list(source_of(Partly)[1].read(["prior"]))


class Uses(nn.Module):
    """A constructor that does something with the parameter of a child."""

    def __init__(self, use: Callable[[Any, nn.Parameter, torch.Tensor], None]) -> None:
        super().__init__()
        values = torch.zeros(4, 4)
        self.child = nn.Linear(4, 4)
        self.child.weight = nn.Parameter(values)
        use(self, self.child.weight, values)


USES: dict[str, tuple[Callable[[Any, nn.Parameter, torch.Tensor], None], str]] = {
    "reads": (lambda net, weight, _: setattr(net, "most", float(weight.detach().max())), "its constructor reads"),
    "lists": (lambda net, weight, _: setattr(net, "most", weight.tolist()), "its constructor reads"),
    "sets": (lambda net, weight, _: setattr(weight, "data", torch.ones(4, 4)), "reads or replaces the values"),
    "buffer": (lambda net, weight, _: net.register_buffer("again", weight.detach() * 2), "'again' has no values"),
    "in a list": (lambda net, weight, _: setattr(net, "again", [weight.detach()]), "'again' has no values"),
    "same memory": (lambda net, _, values: net.register_buffer("again", values), r"shares its memory .*clone\(\)"),
    "parameter": (lambda net, _, values: setattr(net, "again", nn.Parameter(values[:2])), r"shares its memory"),
}


@pytest.mark.parametrize(("use", "words"), USES.values(), ids=USES)
def test_constructors_that_need_values_or_share_memory_are_refused(use: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"weights_on='workers': .*{words}"):
        build_on_meta(lambda: Uses(use), 0)
    build_on_meta(lambda: Uses(lambda *_: None), 0)
