"""Data that every layer shares: frozen, comparable, printable; standard library only.

Letters used throughout:

    S  stages                          b  micro-batch size (samples)
    M  micro-batches per mini-batch    k  group size of kFkB
    V  weight versions                 r  slack of a hop (micro-batches in flight over one link)

    F  forward of one micro-batch on one stage
    B  its whole backward;  I  only the part for the inputs;  W  only the part for the weights

The letter B never means a batch: a mini-batch is always spelled ``minibatch``.
A *worker* is one actor on one device and may hold several stages; a *stage* is a run of the
model's operations; a *hop* or *link* joins stage s to stage s + 1.
"""
