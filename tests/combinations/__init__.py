"""Runs of features that meet by chance, each against plain PyTorch that does the same in one loop.

    draw        a model, sizes, and fields of PipelineConfig, drawn together     drawn.py, of the models in nets.py
    train       the pipeline in threads, perhaps stopped and gone on with in another layout        trial.py
    plain       the same in one process: versions of weights, lanes, precision, clipping           plain.py
    compare     losses, norms, learning rates, parameters and buffers                              trial.py

Every feature has tests of its own. What only shows where several of them meet is looked for here: either a combination
trains what plain PyTorch trains, or it is refused before the first step with a message that names a field.
"""
