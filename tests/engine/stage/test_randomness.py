"""Keyed draws: the same key gives the same bits in eager code and in any thread; any other key others."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch.nn import functional

from raypipe.engine.stage.randomness import GraphKey, KeyedRandomness, RandomKey, draws_randomness, dropout, keyed_call
from raypipe.errors import CaptureError, StageError
from tests.exactness import same_bits

aten = torch.ops.aten
KEY = RandomKey(seed=3, step=5, microbatch=17)


def drawn(key: RandomKey, first: int = 0) -> list[torch.Tensor]:
    """Everything that a model may draw, in order, and dropout in the middle."""
    x = torch.linspace(-1, 1, 1024).reshape(4, 16, 4, 4)
    with KeyedRandomness(key, first):
        return [
            torch.rand(5), functional.dropout(x, 0.3), torch.randn_like(x), torch.randint(9**9, (6,)),
            torch.randint(5, 9**9, (6,)), functional.dropout2d(x, 0.5), torch.bernoulli(torch.full((40,), 0.5)),
            torch.randperm(20), torch.rand_like(x), torch.empty(4).normal_(), functional.alpha_dropout(x, 0.2, True),
            torch.multinomial(x.abs().flatten(1), 9), torch.randint_like(x, 10**6), torch.randint_like(x, 5, 10**6),
            functional.rrelu(x, training=True), torch.normal(x, x.abs()),
        ]  # fmt: skip


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(same_bits, a, b))


@pytest.mark.slow
def test_the_same_key_draws_the_same_bits_whatever_the_global_generator_does() -> None:
    torch.manual_seed(1)
    first = drawn(KEY)
    state = torch.get_rng_state()
    assert equal(drawn(KEY), first)
    torch.manual_seed(2)
    assert equal(drawn(KEY), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


@pytest.mark.parametrize("other", [KEY._replace(seed=4), KEY._replace(step=6), KEY._replace(microbatch=18)])
def test_any_other_key_draws_others(other: RandomKey) -> None:
    assert not any(map(same_bits, drawn(KEY), drawn(other)))


@pytest.mark.slow
def test_the_generators_of_a_graph_draw_the_same_bits_once_they_are_seeded() -> None:
    generators: dict[int, torch.Generator] = {}
    first, other = GraphKey(KEY, generators), GraphKey(KEY._replace(microbatch=18), generators)
    assert equal(drawn(first, 2), drawn(KEY, 2)), "those that are missing are seeded"
    assert len({id(generator) for generator in generators.values()}) == len(generators)
    for key in (other, first):
        assert not any(map(same_bits, drawn(key, 2), drawn(RandomKey(*key), 2))), "others are not"
        key.seed_generators()
        assert equal(drawn(key, 2), drawn(RandomKey(*key), 2))


def test_parts_of_a_key_do_not_stand_in_for_each_other() -> None:
    keys = [RandomKey(*parts) for parts in itertools.product(range(3), repeat=3)]
    words = {
        (key, index): int(keyed_call(aten.randint.default, key, index, 2**62, [1]))
        for key in keys
        for index in range(4)
    }
    assert len(set(words.values())) == len(words) == 108


def test_dropout_is_atens_given_the_same_draw() -> None:
    x = torch.randn(7, 11, requires_grad=True)
    with KeyedRandomness(KEY, 4):
        theirs = functional.dropout(x, 0.3, training=True)
    ours = dropout(x, 0.3, KEY, 4)
    assert same_bits(ours, theirs)
    upstream = torch.randn(7, 11)
    assert same_bits(*(torch.autograd.grad(y, x, upstream)[0] for y in (ours, theirs)))
    assert 0 < int((ours == 0).sum()) < x.numel()
    torch.manual_seed(6)
    unkeyed = functional.dropout(x, 0.3)
    noise = torch.empty_like(x).bernoulli_(0.7, generator=torch.Generator().manual_seed(6)).div_(0.7)
    assert same_bits(unkeyed, (x * noise).detach()), "aten::dropout is no longer what dropout() imitates"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_attention_with_dropout_is_atens_given_the_same_draw(dtype: torch.dtype) -> None:
    """Outputs and gradients, with every mask, with fewer heads of k and v, and under autocast."""
    length, longer = 9, 14
    masks = (None, torch.rand(1, 1, length, longer) > 0.3, torch.randn(2, 1, length, longer).to(dtype))
    for mask, causal, scale, heads, cast in itertools.product(
        masks, (False, True), (None, -0.2), (6, 2), (False, True)
    ):
        if mask is not None and causal:
            continue
        q = torch.randn(2, 6, length, 16, dtype=dtype, requires_grad=True)
        k, v = (torch.randn(2, heads, longer, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        given: tuple[Any, ...] = (q, k, v, mask, 0.3, causal)
        named: dict[str, Any] = {"scale": scale, "enable_gqa": heads != 6}
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            ours = keyed_call(aten.scaled_dot_product_attention.default, KEY, 4, *given, **named)
            with KeyedRandomness(KEY, 4):
                theirs = functional.scaled_dot_product_attention(*given, **named)
        assert same_bits(ours, theirs), (mask, causal, scale, heads, cast)
        upstream = torch.randn_like(ours)
        assert all(map(same_bits, *(torch.autograd.grad(y, (q, k, v), upstream) for y in (ours, theirs))))


def test_what_draws_nothing_takes_no_number() -> None:
    x = torch.ones(4)
    with KeyedRandomness(KEY) as mode:
        functional.dropout(x, 0.0)
        functional.dropout(x, 0.5, training=False)
        torch.rand(3, generator=torch.Generator().manual_seed(0))
        assert mode.index == 0
        functional.dropout(x, 0.5)
        assert mode.index == 1
    assert not draws_randomness(aten.dropout.default, (x, 0.0, True), {})
    assert not draws_randomness(aten.dropout.default, (x, 0.5, False), {})
    assert draws_randomness(aten.dropout.default, (x, 0.5, True), {})
    assert not draws_randomness(aten.relu.default, (x,), {})


@pytest.mark.slow
def test_threads_at_once_draw_what_one_alone_draws() -> None:
    """Four threads with the same and with other keys, a hundred rounds each, all starting together."""
    alone = {step: drawn(KEY._replace(step=step)) for step in range(2)}
    start, wrong = threading.Barrier(4), []

    def work(step: int) -> None:
        start.wait()
        for round_ in range(100):
            if not equal(drawn(KEY._replace(step=step)), alone[step]):
                wrong.append((step, round_))

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_an_operation_that_draws_twice_is_refused() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3) + torch.rand(3)

    with pytest.raises(StageError, match="drew 2 times where 1 were planned"):
        keyed_call(twice, KEY, 0, torch.ones(3))


def test_an_operation_without_generator_is_refused() -> None:
    lstm = torch.nn.RNN(3, 4, num_layers=2, dropout=0.5)
    library = torch.library.Library("raypipe_test", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("noise", lambda x: x, "CPU")
    with KeyedRandomness(KEY), pytest.raises(CaptureError, match="takes no generator"):
        torch.ops.raypipe_test.noise(torch.ones(2))
    with KeyedRandomness(KEY) as mode:
        lstm(torch.ones(2, 1, 3))
    assert mode.index > 0
