"""State by parameter name, never by rank: each stage writes what it owns, a manifest says that all is there.

<run>/checkpoints/step_0000100/   stage_0.safetensors             parameters and persistent buffers by name
                                  stage_0.optimizer.safetensors   "exp_avg/transformer.h.0.weight"
                                  stage_1...
                                  manifest.json                   last: complete or absent
                                  generation_2/stage_0...         of whoever trained the run second, and so on

save      take_snapshot -> write_snapshot (on every stage) -> make_manifest -> commit -> prune
restore   find_checkpoint -> check_position -> load_stage (on every stage, of any number), from any StateSource
"""

from __future__ import annotations

from raypipe.engine.checkpoint.best import best_checkpoint
from raypipe.engine.checkpoint.find import (
    Checkpoint,
    Refusal,
    find_checkpoint,
    find_for_reading,
    newest_step,
    open_checkpoint,
)
from raypipe.engine.checkpoint.manifest import MANIFEST, Manifest, check_position, files_folder, make_manifest
from raypipe.engine.checkpoint.prune import prune
from raypipe.engine.checkpoint.restore import FreshOptions, load_stage
from raypipe.engine.checkpoint.score import score
from raypipe.engine.checkpoint.snapshot import (
    StageSnapshot,
    checkpoint_name,
    clear,
    commit,
    take_snapshot,
    write_snapshot,
)
from raypipe.engine.checkpoint.source import CheckpointSource, GivenTensors, Kept, StateSource, read_all
from raypipe.engine.checkpoint.state_dict import load_state_dict
from raypipe.engine.checkpoint.tensor_table import TensorInfo

__all__ = [
    "MANIFEST", "Checkpoint", "CheckpointSource", "FreshOptions", "GivenTensors", "Kept", "Manifest", "Refusal",
    "StageSnapshot", "StateSource", "TensorInfo", "best_checkpoint", "check_position", "checkpoint_name", "clear",
    "commit", "files_folder", "find_checkpoint", "find_for_reading", "load_stage", "load_state_dict", "make_manifest",
    "newest_step", "open_checkpoint", "prune", "read_all", "score", "take_snapshot", "write_snapshot",
]  # fmt: skip
