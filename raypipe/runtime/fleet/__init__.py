"""Fleet of a run: starts, configures, watches, replaces and ends its stage actors, from the driver's process.

    fleet.py  --places.py-->  ../worker/worker.py   one actor per worker: its stages, links and segments
       |
       +--watch.py---------> ../nodes/              process states on a node, notices of its end
       v
    failures.py               release of workers, the failure that caused the others, how a process ended

``recovery.py`` applies every change of the members or of the plan. ``growth.py`` adds workers to a run whose number of
workers may change. ``spares.py`` keeps started workers ready as replacements.
"""
