"""Fleet of a run: starts, configures, watches, replaces and ends the run's stage actors, from the driver's process.

    fleet.py  --places.py-->  ../worker/worker.py   one actor per worker: its stages, links and segments
       |
       +--watch.py---------> ../nodes/              process states on a node, notices of its end
       v
    failures.py               ends work after a failure, finds the failure that caused the others

A *member* is an actor of the fleet: a *worker*, which has stages of the plan, or a *spare*, which has none. The
*roster* is the list of the members. An *order* is the driver's command to run a segment (ir/segment.py: the actions of
one or more mini-batches). A *term* is a number that grows with each driver of a run.

``recovery.py`` applies every change of the workers or of the plan. ``growth.py`` keeps spares ready as replacements,
and adds workers to a run whose number of workers may change.
"""
