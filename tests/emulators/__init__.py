"""Asynchronous pipelines as plain PyTorch: one process, one loop, no schedule; nothing here knows raypipe.

A pipeline without a flush differs from ordinary training in one thing only: which weights a micro-batch meets.
`versions.py` says which, as a formula per mode; `training.py` trains with them, one micro-batch after the other, and
says between which micro-batches a pipeline drains:

    load the versions of micro-batch k on every stage -> forward, backward -> load the newest -> step, where one is due

`nets.py` has models that are lists of layers, so that a cut is a position in the list. A real pipeline must end with
the same parameters, to the bit.
"""
