"""Data that every layer shares: frozen, comparable, printable; standard library only.

Letters used throughout:

    S  stages                          b  micro-batch size (samples)
    M  micro-batches per mini-batch    k  group size of kFkB
    V  weight versions                 r  slack of a hop: forwards that a stage runs ahead of the next; 1 is 1F1B

    F  forward of one micro-batch on one stage
    B  its whole backward;  I  only the part for the inputs;  W  only the part for the weights

The letter B never means a batch: a mini-batch is always spelled ``minibatch``.
A *worker* is one actor on one device and may hold several stages. A *stage* is a range of the model's operations.
A *hop* joins stage s to stage s + 1, by one *link* for each pair of their workers.
A *row* is the list of actions of one worker. A *lane* is one of the partial sums of gradients, to which micro-batches
are assigned in turn; the lanes are then added up in a fixed order. A *generation* is the number of a plan in its run.
"""
