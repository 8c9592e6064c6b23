"""The zoo: models, losses and data sets, each with one verdict, shown by training it.

    row.py          a row: what is trained, on what, with which loss, and the verdict
    training.py     train it as a user would, beside plain PyTorch, and say where the two differ
    cases/          the rows, a file per family
    test_zoo.py     a test per row
    table.py        docs/zoo.md from the rows: python -m tests.zoo.table

    equal      losses, gradient norms, every gradient, parameter and buffer: to the bit
    rounding   within a stated bound, for a reason in words
    refused    before the first step, with a message asserted whole

Beside that, the loss and the gradients of the first step are those of plain PyTorch on the whole mini-batch at once,
wherever neither random numbers nor statistics of a batch stand between the two, and ``eval_loss`` is plain PyTorch's
on all samples at once. The zoo trains in threads of one process; what travels between processes is tested elsewhere.
"""
