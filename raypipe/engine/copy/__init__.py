"""In-memory copies of a stage's state between two steps, for its own rollback and for other workers to hold.

    StageState --take(step)--> StageCopies      two copies, each one header and one block of memory
                                   | copy(step)             the same stage rolls back:  renew, load_stage
                                   |                        another process is sent header and block, in parcels
                                   v
                              HeldCopies --copy(step).piece()--> copy_source --> any stage, by name: load_stage

A checkpoint holds the tensors that a stage is the first to own and that belong to the user's state_dict. A copy holds
all tensors of the stage, also the buffers that are in no checkpoint: a forward may have changed them.
"""

from __future__ import annotations

from raypipe.engine.copy.copy_header import COMMON, CopyHeader, CopyPiece, copy_source, views_of
from raypipe.engine.copy.peer_copies import HeldCopies, HeldCopy
from raypipe.engine.copy.stage_copies import GENERATIONS, StageCopies

__all__ = [
    "COMMON", "GENERATIONS", "CopyHeader", "CopyPiece", "HeldCopies", "HeldCopy", "StageCopies", "copy_source",
    "views_of",
]  # fmt: skip
