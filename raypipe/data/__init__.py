"""Training data: samples of equal shape, read by position, with equal values in every process.

    ragged token lists ----> Pad        a collate_fn: to one length, or to the smallest of a few that holds a mini-batch
    documents of tokens ---> Packed     a dataset of blocks of one length, without padding
    folders of images -----> Images     a dataset of (image, label)
    iterables -------------> Stream     epochs of a number of samples

A checkpoint stores the next sample as two integers, (epoch, offset). For a stream it also stores a mark: plain data
from which reading resumes without reading the items before it.

    open_data.py    which source reads the user's data: arrow_source.py, map_source.py or stream_source.py
    epoch_order.py  the order of the rows of an epoch
    stacking.py     items -> columns of a mini-batch
"""

from __future__ import annotations

from raypipe.data.datasets import Images, Packed, Pad
from raypipe.data.stream_source import Stream

__all__ = ["Images", "Packed", "Pad", "Stream"]
