"""A copy of a stage is all of it: whoever goes back to it goes on to the same bits, cut as before or otherwise."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from raypipe.engine.copy import CopyHeader, CopyPiece, HeldCopies, StageCopies, copy_source
from raypipe.engine.optim.state import StageState
from raypipe.errors import CheckpointError
from tests.engine.copy.stages import OPTIMIZERS, Stage, parcels_of, piece_of, same, source_of
from tests.engine.rings import program_of
from tests.exactness import same_bits


def sent(copies: StageCopies, step: int, held: HeldCopies, parcel_bytes: int = 7) -> CopyPiece:
    """What another process makes of a copy, when the header has become text and the block parcels."""
    header, block = copies.copy(step)
    coming = held.begin(CopyHeader.from_json(header.to_json()))
    for offset, data in parcels_of(block, parcel_bytes):
        coming.place(offset, bytes(data))
    return held.copy(step).piece()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_back_in_place_to_the_same_bits(optimizer: str, dtype: torch.dtype, at: int) -> None:
    """At step 0 most optimizers have kept nothing yet."""
    stage = Stage(optimizer, dtype)
    for _ in range(at):
        stage.step()
    copies, then, held = stage.copies(), stage.all(), dict(stage.state.buffers)
    copies.take(at, stage.state.updates)
    for _ in range(2):
        stage.step()
    later = stage.all()
    assert not same(later, then)
    for source in (source_of(copies, at), copy_source([sent(copies, at, HeldCopies())])):
        stage.back(source)
        assert stage.state.updates == at
        assert all(stage.state.buffers[name] is buffer for name, buffer in held.items()), "forwards hold the buffers"
        assert same(stage.all(), then)
        for _ in range(2):
            stage.step()
        assert same(stage.all(), later)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_has_gone_back_shares_no_memory_with_the_copy(optimizer: str) -> None:
    stage = Stage(optimizer)
    stage.step()
    copies, then = stage.copies(), stage.all()
    copies.take(1, 1)
    stage.step()
    stage.back(source_of(copies, 1))
    copies.copy(1)[1].fill_(77)
    assert same(stage.all(), then)


def test_tensors_without_elements_and_of_every_alignment() -> None:
    tensors = {"a": torch.zeros(3, dtype=torch.int8), "b": torch.ones(0, 2, dtype=torch.float64)}
    tensors |= {"c": torch.arange(3, dtype=torch.int16), "d": torch.tensor(2.5, dtype=torch.float64)}
    program = replace(program_of((), {}), buffers=tuple(tensors))
    copies = StageCopies(program, StageState(program, tensors, *Stage("sgd").make))
    copies.take(0, 0)
    found = dict(copy_source([sent(copies, 0, HeldCopies())]).read(tensors))
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def test_two_are_kept_and_the_oldest_gives_its_memory() -> None:
    stage = Stage("adamw")
    stage.step()
    copies = stage.copies()
    kept = {}
    for step in (1, 2):
        copies.take(step, step)
        kept[step] = stage.all()
        stage.step()
    blocks = {copies.copy(step)[1].data_ptr() for step in copies.steps}
    for step in (3, 4):
        copies.take(step, step)
        kept[step] = stage.all()
        assert copies.steps == (step - 1, step)
        assert {copies.copy(step)[1].data_ptr() for step in copies.steps} == blocks
        stage.step()
    with pytest.raises(CheckpointError, match=r"no copy of step 2, only of \[3, 4\]"):
        source_of(copies, 2)
    for step in (4, 3):
        stage.back(source_of(copies, step))
        assert same(stage.all(), kept[step])


def test_what_comes_after_the_step_gone_back_to_is_forgotten() -> None:
    """Codecs may be others when it is done again. Meanwhile the copy of that step stays."""
    stage = Stage("momentum")
    copies = stage.copies()
    for step in (0, 1):
        copies.take(step, step)
        stage.step()
    stage.back(source_of(copies, 0))
    copies.forget_after(0)
    finish = copies.begin(0, 0)
    assert copies.steps == (0,)
    finish()
    stage.state.parameters["w"].data.add_(1)  # as another codec might
    then = stage.all()
    copies.take(1, 0)
    assert copies.steps == (0, 1)
    stage.back(source_of(copies, 1))
    assert same(stage.all(), then)


def test_what_cannot_be_copied_is_refused_and_older_copies_stay() -> None:
    stage = Stage("sgd")
    copies = stage.copies()
    copies.take(0, 0)
    optimizer = stage.state.optimizer
    assert optimizer is not None
    optimizer.state[stage.state.parameters["w"]]["old_dirs"] = [torch.ones(2)]  # as LBFGS does
    with pytest.raises(CheckpointError, match="SGD keeps a list under 'old_dirs' for 'w'"):
        copies.take(1, 1)
    assert copies.steps == (0,)


class TestInTheBackground:
    def test_buffers_are_copied_at_once_and_the_step_waits_for_the_rest(self) -> None:
        stage = Stage("adamw")
        stage.step()
        then, copies = stage.all(), stage.copies()
        finish = copies.begin(1, 1)
        assert copies.steps == ()
        for buffer in stage.state.buffers.values():
            buffer.zero_()  # as a forward may
        stepped = threading.Thread(target=stage.step)  # it asks state.wait_until_read first
        stepped.start()
        assert same({name: stage.all()[name] for name in ("w", "scale")}, {name: then[name] for name in ("w", "scale")})
        finish()
        stepped.join()
        assert copies.steps == (1,)
        stage.back(source_of(copies, 1))
        assert same(stage.all(), then)

    def test_a_copy_that_failed_is_none_and_the_step_goes_on(self) -> None:
        stage = Stage("sgd", trained=False)
        stage.state.parameters["w"] = torch.nn.Parameter(torch.empty(5, 3, device="meta"))
        copies = stage.copies()
        finish = copies.begin(0, 0)
        with pytest.raises(NotImplementedError, match="meta"):
            finish()
        stage.state.wait_until_read()
        assert copies.steps == ()


class TestHeld:
    def test_the_older_one_stays_until_the_newer_is_whole(self) -> None:
        stage = Stage("momentum")
        copies, held = stage.copies(), HeldCopies()
        for step in range(4):
            stage.step()
            copies.take(step, step + 1)
            header, block = copies.copy(step)
            coming = held.begin(CopyHeader.from_json(header.to_json()))
            for offset, data in parcels_of(block, 32):
                assert held.steps == ((step - 1,) if step else ())
                with pytest.raises(CheckpointError, match=f"only {offset} of {block.nbytes} bytes have come"):
                    coming.piece()
                coming.place(offset, data)
            assert held.steps == ((step - 1, step) if step else (0,))
            assert sum(copy.block.nbytes for copy in held._copies) <= 2 * block.nbytes
        then = stage.all()
        stage.step()
        stage.back(copy_source([held.copy(3).piece()]))
        assert same(stage.all(), then)

    def test_one_that_broke_off_gives_its_place_to_the_next(self) -> None:
        stage = Stage("momentum")
        copies, held = stage.copies(), HeldCopies()
        for step in (1, 2, 3):
            stage.step()
            copies.take(step, step)
            if step == 2:
                held.begin(copies.copy(step)[0]).place(0, b"\0" * 8)
            else:
                sent(copies, step, held)
        assert held.steps == (1, 3)

    def test_where_the_run_went_back_later_copies_go_and_that_one_stays(self) -> None:
        copies, held = Stage("sgd").copies(), HeldCopies()
        for step in (1, 2):
            copies.take(step, step)
            sent(copies, step, held)
        assert held.begin(copies.copy(1)[0]).whole
        assert held.steps == (1,)
        copies.take(3, 3)
        sent(copies, 3, held)
        assert held.steps == (1, 3)

    def test_parcels_may_come_twice_but_none_may_be_missing(self) -> None:
        stage = Stage("momentum")
        copies, held = stage.copies(), HeldCopies()
        copies.take(0, 0)
        header, block = copies.copy(0)
        coming = held.begin(header)
        parcels = list(parcels_of(block, 16))
        for offset, data in (parcels[0], parcels[1], parcels[0], *parcels[1:-1]):
            coming.place(offset, data)
        for offset, data in ((parcels[-1][0] + 1, b"x"), (parcels[-1][0], b"x" * 99)):
            with pytest.raises(CheckpointError, match=r"Bytes \d+ to \d+ of a copy"):
                coming.place(offset, data)
        coming.place(*parcels[-1])
        found = [same_bits(*pair) for pair in zip(read(coming.piece()), read(piece_of(copies, 0)), strict=True)]
        assert found == [True] * 5

    @pytest.mark.parametrize("field", ["size_bytes", "table", "groups", "step"])
    def test_a_header_that_was_changed_is_refused(self, field: str) -> None:
        copies = Stage("sgd").copies()
        copies.take(0, 0)
        header, _ = copies.copy(0)
        wrong: Any = {"size_bytes": header.size_bytes + 1, "table": {}, "groups": ({"lr": 0.1},), "step": -1}[field]
        with pytest.raises(CheckpointError):
            CopyHeader.from_json(replace(header, **{field: wrong}).to_json())


def read(piece: CopyPiece) -> list[torch.Tensor]:
    source = copy_source([piece])
    return [tensor for _, tensor in source.read(source.names)]


def test_copies_of_other_numbers_of_updates_are_not_joined() -> None:
    sources = []
    for step in (1, 2):
        copies = Stage("sgd").copies()
        copies.take(step, step)
        header, fetch = piece_of(copies, step)
        sources.append(CopyPiece(replace(header, stage=step), fetch))
    with pytest.raises(CheckpointError, match="Copies after different numbers of updates"):
        copy_source(sources)
