"""Parameters that a constructor makes: on a worker, of any stage, the same as anywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypipe.engine.initial import tape
from raypipe.engine.initial.building import built_without_weights
from raypipe.errors import ConfigError

pytestmark = pytest.mark.engine


class Mixed(nn.Module):
    """What constructors do: defaults, torch.nn.init, values of their own, copies, ties, buffers, views."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32, padding_idx=3)
        self.linear = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.scale = nn.Parameter(torch.linspace(0.0, 1.0, 32))
        self.drawn = nn.Parameter(torch.randn(48, 32))
        self.twin = nn.Parameter(torch.empty(48, 32))
        self.frozen = nn.Parameter(torch.full((32, 32), 2.5), requires_grad=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight
        self.rnn = nn.LSTM(32, 16, batch_first=True)
        self.register_buffer("angles", torch.arange(0, 32, 2).float() / 32, persistent=False)
        self.register_buffer("much", torch.zeros(40, 32))
        self.much[3] = 1.0
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.drawn, std=0.02)
        with torch.no_grad():
            self.twin.copy_(self.drawn)
            self.twin[5] = 7.0
            self.drawn.mul_(2.0)
        nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(1))
        self.table.weight.data[3].zero_()


@pytest.fixture(params=[1, 1 << 16], ids=["all is deferred", "small values are real"])
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tape, "LEAST_ELEMENTS", request.param)
    return int(request.param)


def test_a_model_is_built_with_shapes_only(threshold: int) -> None:
    built, _ = built_without_weights(Mixed, 0)
    real = Mixed()
    assert [n for n, _ in built.named_parameters()] == [n for n, _ in real.named_parameters()]
    for (name, bare), own in zip(built.named_parameters(), real.parameters(), strict=True):
        assert bare.is_meta, name
        assert (bare.shape, bare.stride(), bare.dtype, bare.requires_grad) == (
            own.shape, own.stride(), own.dtype, own.requires_grad,
        ), name  # fmt: skip
    assert built.head.weight is built.table.weight
    assert {name: buffer.device.type for name, buffer in built.named_buffers()} == {"angles": "cpu", "much": "cpu"}
    assert torch.equal(built.angles, real.angles)
    assert torch.equal(built.much, real.much)


def test_what_draws_nothing_has_the_constructors_values(threshold: int) -> None:
    built, recorded = built_without_weights(Mixed, 0)
    found, real = dict(recorded.source(built.named_parameters(), 0).read(dict(built.named_parameters()))), Mixed()
    for name in ("norm.weight", "norm.bias", "scale", "frozen"):
        assert torch.equal(found[name], getattr(real, name, None) if "." not in name else real.get_parameter(name))
    assert torch.equal(found["table.weight"][3], torch.zeros(32))
    assert torch.equal(found["twin"][5], torch.full((32,), 7.0))
    others = [row for row in range(48) if row != 5]
    assert torch.equal(found["drawn"][others], 2.0 * found["twin"][others])
    product = found["linear.weight"] @ found["linear.weight"].T
    assert torch.allclose(product, torch.eye(32), atol=1e-5)
    assert found["drawn"].abs().max() < 4.0
    assert 0.03 < found["drawn"].std() < 0.05
    assert 0.9 < found["table.weight"].std() < 1.1
    assert (found["rnn.weight_hh_l0"].abs() <= 0.25).all()


def test_a_parameter_is_the_same_whatever_else_is_made(threshold: int) -> None:
    built, recorded = built_without_weights(Mixed, 4)
    named = dict(built.named_parameters())
    everything = dict(recorded.source(named.items(), 4).read(named))
    for name in named:
        torch.rand(3)  # the global generator has no part in it
        again, record = built_without_weights(Mixed, 4)
        ((_, alone),) = record.source([(name, again.get_parameter(name))], 4).read([name])
        assert torch.equal(alone, everything[name]), name
        assert alone.untyped_storage().nbytes() == alone.nbytes
    other = dict(recorded.source(named.items(), 5).read(named))
    assert not torch.equal(other["table.weight"], everything["table.weight"])


def test_the_callers_generators_stay(threshold: int) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    built_without_weights(Mixed, 0)
    assert torch.equal(torch.rand(2), expected)


class LooksAtItsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 300)
        self.largest = float(self.linear.weight.detach().abs().max())


class BufferOfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("start", self.linear.weight.detach() * 2)


def test_who_looks_at_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights_on='workers': the model cannot be built without weights"):
        built_without_weights(LooksAtItsWeights, 0)


def test_a_buffer_that_follows_from_weights_has_the_values_that_the_workers_make() -> None:
    built, recorded = built_without_weights(BufferOfWeights, 0)
    ((_, weight),) = recorded.source([("linear.weight", built.linear.weight)], 0).read(["linear.weight"])
    assert torch.equal(built.start, weight * 2)


def test_values_from_outside_that_are_too_many_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_VALUE_BYTES", 100)
    values = torch.arange(64.0).sqrt()

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prior = nn.Parameter(values + 1)

    built, recorded = built_without_weights(Given, 0)
    with pytest.raises(ConfigError, match=r"'prior'.*init_from=.*weights_on='client'"):
        recorded.source(built.named_parameters(), 0).check()


def test_other_threads_build_their_models_as_ever() -> None:
    import threading

    made: list[nn.Module] = []

    def build() -> nn.Module:
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    built, _ = built_without_weights(build, 0)
    assert built.weight.is_meta
    assert not made[0].weight.is_meta


class Unmade(nn.Module):
    """Of two large parameters a part of one is never written to, and the other one is, piece by piece."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.pieces = nn.Parameter(torch.empty(512, 256))
        self.rest = nn.Parameter(torch.empty(512, 256))
        for part in self.pieces.data.chunk(4):
            nn.init.xavier_uniform_(part)
        with torch.no_grad():
            self.rest[: 512 if whole else 511].normal_()


def test_what_no_constructor_made_is_named() -> None:
    for whole in (True, False):
        built, made = built_without_weights(lambda whole=whole: Unmade(whole=whole), 0)
        source = made.source(built.named_parameters(), 0)
        if whole:
            source.check()
            continue
        with pytest.raises(ConfigError, match=r"leaves 'rest', or a part of it, as torch.empty made it.*init_from"):
            source.check()


def test_values_of_all_parameters_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some = nn.Parameter(torch.arange(256.0))
            self.more = nn.Parameter(torch.arange(256.0) + 1)

    built, made = built_without_weights(Given, 0)
    made.source(built.named_parameters(), 0).check()
    monkeypatch.setattr(tape, "MOST_TOTAL_BYTES", 1500)
    built, made = built_without_weights(Given, 0)
    with pytest.raises(ConfigError, match=r"begins with values in 'more' .* MiB in all such parameters"):
        made.source(built.named_parameters(), 0).check()


def test_a_constructor_that_lists_numbers_of_a_parameter_is_refused_with_the_cure() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.numbers = self.linear.weight.tolist()

    with pytest.raises(ConfigError, match=r"looks at, or sets from elsewhere.*weights_on='client'"):
        built_without_weights(Listing, 0)
