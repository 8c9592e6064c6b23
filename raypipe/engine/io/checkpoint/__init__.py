"""Checkpoints: files of parameters, buffers and optimizer state by parameter name.

Each stage writes its buffers, and the parameters that no earlier stage holds. The manifest is written last and
completes the checkpoint.

<run>/checkpoints/step_0000100/   stage_0.safetensors             parameters and persistent buffers by name
                                  stage_0.optimizer.safetensors   "exp_avg/transformer.h.0.weight"
                                  stage_1...
                                  manifest.json                   last: complete or absent
                                  generation_2/stage_0...         files of the run's second process, and so on

save      take_snapshot -> write_snapshot (on every stage) -> make_manifest -> commit -> prune
restore   find_checkpoint -> check_position -> load_stage (on every stage, of any number), from any StateSource
"""

from __future__ import annotations

from raypipe.engine.io.checkpoint.find_checkpoint import (
    Checkpoint,
    Refusal,
    best_checkpoint,
    find_checkpoint,
    find_for_reading,
    newest_step,
    open_checkpoint,
    prune,
    score,
)
from raypipe.engine.io.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SampleOrder,
    check_position,
    files_folder,
    make_manifest,
)
from raypipe.engine.io.checkpoint.restore import FreshOptions, load_stage
from raypipe.engine.io.checkpoint.snapshot import (
    StageSnapshot,
    checkpoint_name,
    clear,
    commit,
    discard,
    take_snapshot,
    write_snapshot,
)
from raypipe.engine.io.checkpoint.state_source import (
    GivenTensors,
    StateSource,
    checkpoint_source,
    load_state_dict,
    read_all,
)
from raypipe.engine.io.checkpoint.tensor_file import TensorInfo

__all__ = [
    "MANIFEST", "Checkpoint", "FreshOptions", "GivenTensors", "Manifest", "Refusal", "SampleOrder", "StageSnapshot",
    "StateSource", "TensorInfo", "best_checkpoint", "check_position", "checkpoint_name", "checkpoint_source",
    "clear", "commit", "discard", "files_folder", "find_checkpoint", "find_for_reading", "load_stage",
    "load_state_dict", "make_manifest", "newest_step", "open_checkpoint", "prune", "read_all", "score",
    "take_snapshot", "write_snapshot",
]  # fmt: skip
