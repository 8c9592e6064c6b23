"""State in memory: copies of a stage between two steps, for its own way back and for a neighbour to hold.

    StageState --take(step)--> StageCopies      two generations, each one header and one block of memory
                                   | source(step)           the same stage goes back:  bring_back
                                   |                        another process is sent header and parcels_of its block
                                   v
                              HeldCopies --copy(step).source()--> any stage, by name: load_stage

A checkpoint holds what a stage is the first to own, and what belongs to the user's state_dict. A copy holds all that
the stage has, also the buffers that no checkpoint keeps: a forward may have changed them.
"""

from __future__ import annotations

from raypipe.engine.copy.back import bring_back
from raypipe.engine.copy.header import COMMON, CopyHeader
from raypipe.engine.copy.held import HeldCopies, HeldCopy, parcels_of
from raypipe.engine.copy.source import CopySource, JoinedSource, SlicedSource, put_together, views_of
from raypipe.engine.copy.stage_copies import GENERATIONS, StageCopies

__all__ = [
    "COMMON",
    "GENERATIONS",
    "CopyHeader",
    "CopySource",
    "HeldCopies",
    "HeldCopy",
    "JoinedSource",
    "SlicedSource",
    "StageCopies",
    "bring_back",
    "parcels_of",
    "put_together",
    "views_of",
]
