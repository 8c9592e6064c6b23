"""Checkpoints as data: what is saved is what is read, by name, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raypipe import load_state_dict
from raypipe.engine.io.checkpoint import (
    check_position,
    checkpoint_name,
    find_checkpoint,
    load_stage,
    open_checkpoint,
    take_snapshot,
)
from raypipe.engine.io.checkpoint.manifest import SampleOrder
from raypipe.engine.io.checkpoint.tensor_file import DTYPES, TensorFile, decode, encode, write_tensors
from raypipe.engine.io.storage import Place
from raypipe.engine.optim.state import StageState
from raypipe.errors import CheckpointError
from raypipe.planner.segments import Position
from tests.checkpoints import memory_places, save, small_checkpoint, small_stage
from tests.exactness import Shape, captured, same_bits

KINDS = memory_places()
NAMES = frozenset(captured("mlp")[1].parameters)


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with KINDS[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place.of(tmp_path / "run")


def test_any_place_gives_back_what_was_saved(run: Place) -> None:
    small_checkpoint(run, 7)
    checkpoint, refusals = find_checkpoint(run)
    assert checkpoint is not None
    assert (checkpoint.folder, checkpoint.place, refusals) == (
        "checkpoints/step_0000007",
        run / "checkpoints/step_0000007",
        (),
    )
    cut, saved = small_stage()
    _, fresh = small_stage(scale=5.0)
    state = load_state_dict(run.path, storage_filesystem=run.filesystem)
    for program, old, new in zip(cut, saved, fresh, strict=True):
        load_stage(checkpoint.place, program, new)
        for name, parameter in new.parameters.items():
            assert same_bits(parameter, old.parameters[name])
            assert same_bits(parameter, state[name])
            kept, before = (s.optimizer.state[s.parameters[name]] for s in (new, old))  # type: ignore[union-attr]
            assert kept.keys() == before.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(same_bits(kept[key], before[key]) for key in kept)


def test_the_files_are_plain_and_nothing_else_is_there(local: Place) -> None:
    place = small_checkpoint(local, 100)
    names = {entry.name for entry in place.list()}
    shards = {f"stage_{stage}{kind}.safetensors" for stage in (0, 1) for kind in ("", ".optimizer")}
    assert names == shards | {"manifest.json"}
    weights = load_file(Path(place.path) / "stage_0.safetensors")  # by the library of that name
    moments = load_file(Path(place.path) / "stage_0.optimizer.safetensors")
    assert set(moments) == {f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in weights}
    manifest = json.loads((Path(place.path) / "manifest.json").read_text())
    assert manifest["step"] == 100
    assert manifest["position"] == asdict(Position(step=100))
    assert manifest["stages"][0]["groups"][0]["options"]["betas"] == [0.9, 0.999]
    assert manifest["versions"]["torch"] == str(torch.__version__)


def test_a_snapshot_is_a_copy(local: Place) -> None:
    cut, states = small_stage()
    snapshot = take_snapshot(cut[0], states[0], NAMES)
    before = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    moments = {name: tensor.clone() for name, tensor in (snapshot.optimizer or {}).items()}
    states[0].optimizer.step()  # type: ignore[union-attr]
    assert all(same_bits(snapshot.tensors[name], before[name]) for name in before)
    assert snapshot.optimizer is not None
    assert all(same_bits(snapshot.optimizer[name], moments[name]) for name in moments)


class TestTensorFile:
    @pytest.mark.parametrize("name", DTYPES)
    def test_both_libraries_read_both_files(self, name: str, local: Place) -> None:
        bits = torch.randint(0, 2, (3, 5, 16), dtype=torch.uint8)
        whole = bits.view(torch.bool) if name == "BOOL" else bits.view(DTYPES[name])
        tensors = {"whole": whole, "turned": whole.transpose(0, 1), "empty": whole[:0], "one": whole[0, 0, 0]}
        with local.writer("ours") as write:
            size_bytes, _ = write_tensors(write, tensors)
        assert local.size_bytes("ours") == size_bytes
        with safe_open(Path(local.path) / "ours", "pt") as theirs:
            assert set(theirs.keys()) == set(tensors)
            assert all(same_bits(theirs.get_tensor(key), tensors[key]) for key in tensors)
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, Path(local.path) / "theirs")
        for file in ("ours", "theirs"):
            with TensorFile(local / file) as opened:
                assert all(same_bits(opened.read(key), tensors[key]) for key in tensors)

    @pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.complex128)])
    def test_what_it_cannot_hold_is_named(self, odd: torch.Tensor) -> None:
        with pytest.raises(CheckpointError, match=r"'layer.weight' .* cannot be saved"):
            write_tensors(lambda data: None, {"layer.weight": odd})


_SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


class TestValues:
    @pytest.mark.slow
    @given(st.recursive(_SIMPLE, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5))
    def test_what_is_written_is_read(self, value: Any) -> None:
        text = json.dumps(encode(value, "it"), allow_nan=False)
        assert repr(decode(json.loads(text), "it")) == repr(value)  # tells -0.0 and True apart, and finds nan equal

    @given(st.floats(width=32), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    def test_tensors_of_one_element(self, number: float, dtype: torch.dtype) -> None:
        value = torch.tensor(number, dtype=dtype)
        read = decode(json.loads(json.dumps(encode(value, "it"))), "it")
        assert same_bits(read, value) or (math.isnan(number) and bool(read.isnan()))

    @pytest.mark.parametrize("value", [{}, object(), torch.ones(2), 1j, b"x", [[{1}]]])
    def test_anything_else_is_refused(self, value: Any) -> None:
        with pytest.raises(CheckpointError, match=r"'foreach' of SGD is a .* cannot hold"):
            encode(value, "The option 'foreach' of SGD")

    @pytest.mark.parametrize(
        "value", [{}, {"float": 1}, {"float": []}, {"tensor": 1}, {"tensor": "x", "dtype": "F32"},
                  {"tensor": 1, "dtype": []}, {"tensor": 300, "dtype": "U8"}, {"tensor": 1 << 70, "dtype": "I64"}],
    )  # fmt: skip
    def test_what_nobody_writes_is_refused(self, value: Any) -> None:
        with pytest.raises(CheckpointError, match="'lr'"):
            decode(value, "The option 'lr'")


class Odd(torch.optim.SGD):
    """Keeps one odd thing for its first parameter."""

    odd: Any = None
    key: Any = "history"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]][self.key] = self.odd


@pytest.mark.parametrize(
    ("key", "odd", "words"),
    [
        ("history", [torch.ones(1)], "Odd keeps a list under 'history' for 'layers.0.weight'"),
        ("history", {"a": 1}, "'history', which Odd keeps for 'layers.0.weight', is a dict"),
        ("a/b", 1, "Odd keeps 'a/b' for 'layers.0.weight'"),
        (3, 1, "Odd keeps 3 for 'layers.0.weight'"),
        ("history", torch.eye(2).to_sparse(), "'history/layers.0.weight' .* cannot be saved"),
    ],
)
def test_state_that_is_no_data_is_refused_by_its_key(key: Any, odd: Any, words: str) -> None:
    cut, states = small_stage(1)
    Odd.odd, Odd.key = odd, key
    states[0].optimizer = Odd(list(states[0].parameters.items()), lr=0.1)
    states[0].optimizer.step()
    with pytest.raises(CheckpointError, match=words):
        take_snapshot(cut[0], states[0], NAMES)


def test_state_of_no_parameter_is_refused() -> None:
    cut, states = small_stage(1)
    states[0].optimizer.state["global"] = {"a": 1}  # type: ignore[union-attr, index]
    with pytest.raises(CheckpointError, match="AdamW keeps 'global' for no parameter"):
        take_snapshot(cut[0], states[0], NAMES)


class Half(torch.optim.SGD):
    """Keeps its momentum in less precision than its parameters have; torch would cast it on loading."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"] = torch.full_like(parameter, 1 / 3, dtype=torch.bfloat16)


def test_state_keeps_its_own_dtype(local: Place) -> None:
    cut, states = small_stage(1)
    for state in states:
        state.optimizer = Half(list(state.parameters.items()), lr=0.1)
        state.optimizer.step()
    save(local, cut, states, NAMES, Position(step=1), Shape(40, 8, 4))
    _, (fresh,) = small_stage(1)
    fresh.optimizer = Half(list(fresh.parameters.items()), lr=0.1)
    load_stage(local / checkpoint_name(1), cut[0], fresh, NAMES)
    assert {kept["momentum"].dtype for kept in fresh.optimizer.state.values()} == {torch.bfloat16}


class TestAnotherModel:
    """What does not fit is refused before anything is filled."""

    @pytest.fixture
    def place(self, local: Place) -> Place:
        return small_checkpoint(local, 3)

    def load(self, place: Place, change: Any = None, names: frozenset[str] = NAMES, optimizer: Any = None) -> None:
        cut, states = small_stage(1)
        program, state = cut[0], states[0]
        if optimizer is not None:
            state.optimizer = optimizer(list(state.parameters.items()))
        program = change(program, state) or program if change else program
        before = {name: p.detach().clone() for name, p in state.parameters.items()}
        try:
            load_stage(place, program, state, names)
        except CheckpointError as error:
            if "group" not in str(error) and "trained" not in str(error):
                assert all(same_bits(state.parameters[name], before[name]) for name in before)
            raise

    def test_a_missing_parameter(self, place: Place) -> None:
        def more(program: Any, state: StageState) -> Any:
            state.parameters["extra.weight"] = torch.nn.Parameter(torch.ones(1))
            return replace(program, parameters=(*program.parameters, "extra.weight"))

        with pytest.raises(CheckpointError, match=r"lacks 'extra.weight': it was saved from another model"):
            self.load(place, more, NAMES | {"extra.weight"})

    def test_a_surplus_parameter(self, place: Place) -> None:
        with pytest.raises(
            CheckpointError, match=r"holds, unlike the model, 'layers.0.bias', and 1 other names differ"
        ):
            self.load(place, names=NAMES - {"layers.0.bias", "layers.1.bias"})

    @pytest.mark.parametrize(
        ("bias", "words"),
        [
            (torch.zeros(10), r"'layers.0.bias' was float32 of shape \[9\] .* is float32 of shape \[10\] now"),
            (torch.zeros(9, dtype=torch.float64), r"'layers.0.bias' was float32 .* is float64"),
        ],
    )
    def test_another_shape_or_dtype(self, place: Place, bias: torch.Tensor, words: str) -> None:
        def other(program: Any, state: StageState) -> None:
            state.parameters["layers.0.bias"].data = bias

        with pytest.raises(CheckpointError, match=words):
            self.load(place, other)

    def test_another_optimizer(self, place: Place) -> None:
        with pytest.raises(CheckpointError, match=r"'layers.0.weight' was trained by AdamW .* is by SGD now"):
            self.load(place, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))

    def test_groups_that_were_not(self, local: Place) -> None:
        def two(named: list[Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": named[:1], "lr": 0.1}, {"params": named[1:], "lr": 0.2}])

        cut, states = small_stage(1)
        states[0].optimizer = two(list(states[0].parameters.items()))
        save(local, cut, states, NAMES, Position(step=3), Shape(40, 8, 4))
        self.load(local / checkpoint_name(3), optimizer=two)
        with pytest.raises(CheckpointError, match=r"other options of SGD each \(lr\) and share a group now"):
            self.load(local / checkpoint_name(3), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))

    def test_a_parameter_that_was_frozen(self, local: Place) -> None:
        cut, states = small_stage(1)
        states[0].optimizer = torch.optim.AdamW(list(states[0].parameters.items())[1:], lr=0.1)
        save(local, cut, states, NAMES, Position(step=3), Shape(40, 8, 4))
        with pytest.raises(CheckpointError, match=r"'layers.0.weight' is trained now and was not"):
            self.load(local / checkpoint_name(3))


@pytest.mark.parametrize("field", ["seed", "minibatch_size", "microbatch_size", "num_samples"])
def test_a_position_means_something_in_the_same_run_only(field: str, local: Place) -> None:
    manifest = open_checkpoint(small_checkpoint(local, 3)).manifest
    same = SampleOrder(seed=0, minibatch_size=8, microbatch_size=2, num_samples=40)
    check_position(manifest, same)
    before = getattr(same, field)
    with pytest.raises(CheckpointError, match=f"{field} was {before} .* and is 99 now.* Set it to {before}"):
        check_position(manifest, replace(same, **{field: 99}))
