"""What is tried before a run starts, so that it is refused by name instead of failing in its first step, or in silence.

rehearsal.py           one forward and backward on a few rows
optimizer_trial.py     every stage's optimizer and scheduler, one step on stand-ins; optimizer_apart.py: they do
                       what one optimizer of the whole model does; scheduler_length.py: for as long as the run
loss_check.py          weighted losses of micro-batches make the loss of the mini-batch
watched_rows.py        a loss that cannot be traced compares every output with its own target only
reads.py               nobody reads weights that stages do not train
verify.py              the user's own module beside the captured stages
"""
