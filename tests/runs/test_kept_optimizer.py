"""raypipe.hf.PipelinedTrainer keeps the optimizer's state between two trainings, also after an interrupted one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.engine.io.checkpoint import MANIFEST, checkpoint_name, commit, open_checkpoint
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError
from tests.exactness import unequal

transformers = pytest.importorskip("transformers")

from raypipe.hf import PipelinedTrainer  # noqa: E402
from tests.runs.test_pipelined_trainer import (  # noqa: E402
    _one_thread_only,  # noqa: F401  (a fixture)
    bert,
    parameters,
    texts,
    trainer_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread_only")]


class Fails(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that raises an error at an event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_a_training_after_an_interrupted_one_begins_with_its_optimizer(tmp_path: Path) -> None:
    trainers = []
    for name in ("whole", "interrupted"):
        trainer = trainer_of(PipelinedTrainer, tmp_path / name, bert(), texts(8, classes=3), learning_rate=0.05)
        trainer.train()
        if name == "interrupted":
            trainer.add_callback(fails := Fails("on_train_begin"))
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            trainer.remove_callback(fails)
        trainer.train()
        trainers.append(trainer)
    assert unequal(parameters(trainers[1]), parameters(trainers[0])) == []


def test_an_optimizer_whose_state_an_interruption_has_lost_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(PipelinedTrainer, tmp_path, bert(), texts(8, classes=3))
    trainer.add_callback(fails := Fails("on_step_end"))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(fails)
    for manifest in (tmp_path / "raypipe").rglob(MANIFEST):
        manifest.unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"had saved a checkpoint.*trainer\.optimizer = None"):
            trainer.train()
    trainer.optimizer = None
    trainer.train()


def test_the_loss_scale_is_kept_between_two_trainings(tmp_path: Path) -> None:
    trainer = trainer_of(PipelinedTrainer, tmp_path, bert(), texts(8, classes=3))
    trainer.train()
    place, folder = Place.of(str(tmp_path / "raypipe"), written=True), checkpoint_name(trainer.state.global_step)
    manifest = open_checkpoint(place / folder).manifest
    scale = {"loss_scale": 1024.0, "loss_scale_steps": 3}
    stages = [
        replace(stage, groups=tuple(replace(group, options={**group.options, **scale}) for group in stage.groups))
        for stage in manifest.stages
    ]
    (tmp_path / "raypipe" / folder / MANIFEST).unlink()
    commit(place, folder, replace(manifest, stages=tuple(stages)))
    trainer.add_callback(Fails("on_train_begin"))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    begun = open_checkpoint(place / checkpoint_name(0)).manifest
    options = [group.options for stage in begun.stages for group in stage.groups]
    assert options == [scale] * len(options) != []
