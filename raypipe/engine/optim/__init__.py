"""The end of a step: sums of gradients between replicas, their norm, the optimizer's step and its state.

    all_reduce.py   sums of lanes, bitwise equal on all replicas
    slices.py       gradient chunks in the order of a stage's last backward, and the slices that each replica steps
    update.py       the optimizer's step of all stages; norms.py: the norm that clips gradients
    several.py      one optimizer made of an object that holds several
    state.py        parameters, buffers, optimizer and loss scale of a stage

reduction.py in the parent folder starts the exchange, and has the links it uses.
"""
