"""Decisions, without torch, clock or chance: what is asked and measured comes in, a plan and its reasons go out.

    profile, request, cluster
          |
          v
        tune/                       stages, micro-batches, schedule and weights together, each with its reason
       /    \\
      v      v
    partition/  search/             where to cut  |  which order of actions is the best for this cut, and at these links
      |          |
      v          v
    memory.py  simulate/            bytes at the fullest moment  |  seconds of a step on paper

    control/                        during a run: measured times in, another row of the schedule or another codec out

``columns.py`` holds sums over a graph's nodes, ``tables.py`` a schedule as integer tables, ``segments.py`` says which
samples come next, ``microbatch.py`` how many micro-batches a mini-batch is cut into. ``schedule/`` writes down who runs
what in which order.
"""
