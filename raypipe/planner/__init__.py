"""Planner: pure functions without torch, clock or randomness, from request and measurements to a plan with reasons.

    profile, request, cluster
          |
          v
        search/                     stages, micro-batches, schedule and weights together, each with its reason
       /    \\
      v      v
    partition/  candidates.py       cuts of the graph  |  best order of actions for this partition and these links
      |          |
      v          v
    cost/      replay.py            peak bytes of a stage  |  seconds of a step (simulator.py: also the spans)

    controller/                     during a run: from measured times to other rows of the schedule or other codecs

``schedule/`` builds the rows of actions of each worker, ``dependency_tables.py`` converts them to integer tables,
``compiled_rows.py`` has their only simulation, and ``segments.py`` determines the samples and rows of each step.
``liveness.py`` detects failed workers. A run continues after a loss by ``state_sources.py``, with more or fewer workers
by ``elastic.py``, and with workers of other speeds by ``repartition.py``.
"""
