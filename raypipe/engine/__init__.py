"""Engine: the stages of one worker, computed in one process with torch and without Ray.

    executor.py     runs a row, the list of actions that a schedule gives to one worker, in order
      stage_runner.py     forwards, backwards, messages
      stage/            modules and their passes; weight_ring.py: versions of the weights; feed.py: the data of a stage
      optim/            sums of gradients with the other replicas, norms, the optimizer's step
      messages/         frames and channels to other stages, encoded by codec/
      device/           CPUs and GPUs
    io/             storage, checkpoints that any number of stages can read, the other files of a run
    copy/           copies of a stage's state in memory; initial/: its first weights

``local.py`` runs the same plan with all stages in threads of one process: the reference of every test.
"""
