"""In-memory copies of a stage's state between two steps, for the stage's own rollback, and as backups on other workers.

    StageState --take(step)--> StageCopies      two copies, each one header and one block of memory
                                   | copy(step)             the same stage rolls back:  renew, load_stage
                                   |                        another process is sent header and block, in parcels
                                   v
                              HeldCopies --copy(step).piece()--> copy_source --> any stage, by name: load_stage

A checkpoint holds the stage's tensors of the user's state_dict, except parameters that an earlier stage holds too. A
copy holds all tensors of the stage. Its buffers that are in no checkpoint belong to it too: a forward may have changed
them.
"""

from __future__ import annotations

from raypipe.engine.copy.copy_header import COMMON, CopyHeader, CopyPiece, copy_source, views_of
from raypipe.engine.copy.stage_copies import GENERATIONS, HeldCopies, HeldCopy, StageCopies

__all__ = [
    "COMMON", "GENERATIONS", "CopyHeader", "CopyPiece", "HeldCopies", "HeldCopy", "StageCopies", "copy_source",
    "views_of",
]  # fmt: skip
