"""What replicas of a stage share: their gradients' sums, and, where that is asked for, the state of their optimizer.

    all_reduce.py    sums of lanes, to the same bits on all replicas
    chunks.py        the gradients of a stage in chunks, which close as its last backwards end
    slices.py        which elements each replica steps, where the optimizer's state is shared out

When it begins, and over which links, is in exchange.py beside this folder.
"""
