"""One stage, in one process, with torch and without Ray.

    capture/     the user's model   -->  a graph, and one generated function per stage
    profiling/   the graph          -->  seconds and bytes of every operation
                                             |
                                             v   planner/
    executor.py     carries out a row of a schedule, action by action
      stage_work.py     forwards, backwards, messages; tally.py counts them
      update.py         norms and the optimizer's step
      weight_ring.py    versions of the weights
      feed.py           the data of this stage, from data/
      messages/         frames and channels to other stages, encoded by codec/
      exchange.py       sums of gradients with the other replicas of a stage, replicas/
    shard_writer.py, checkpoint/    files that any number of stages can read
    rundir.py, metrics.py           the other files of a run

``local.py`` runs the same plan with all stages in threads of one process: the reference of every test. ``trial/`` tries
before a run what would fail in it.
"""
