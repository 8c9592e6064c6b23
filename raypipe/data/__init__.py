"""Data as it lies around, made into what a pipeline trains on: samples of equal shape, each found by its number.

    ragged token lists ----> Pad        a collate_fn: to one length, or to the smallest of a few that holds a mini-batch
    documents of tokens ---> Packed     a dataset of blocks of one length, without padding
    folders of images -----> Images     a dataset of (image, label)
    iterables -------------> Stream     epochs of a number of samples

The first three keep no position: which sample comes next is two integers of a checkpoint, wherever and however often a
run goes on. A stream has a mark in every checkpoint beside them.
"""

from __future__ import annotations

from raypipe.data.images import Images
from raypipe.data.packing import Packed
from raypipe.data.padding import Pad
from raypipe.engine.data.stream_source import Stream

__all__ = ["Images", "Packed", "Pad", "Stream"]
