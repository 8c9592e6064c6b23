"""A run without Ray: one loop, whoever carries out the stages' work.

    blueprint.py  what no plan changes --+--> assemble: programs, setups, rows, the controller's configuration
    planned.py    the plan               --+

    requests.py  begin, stop, save  --+
                                      v
    resuming.py  where to begin -->  loop.py  -->  orders for the stages, a segment at a time
                                      |  ^
            controller_thread.py <----+  +---- reports
                     checkpoints.py
                     journal.py     what everybody who watches is told, the last of it in memory (window.py)

``lease.py`` and ``holder.py`` see to it that one process trains a run at a time, ``same_run.py`` that a name is never
another run in silence, ``threads.py`` carries the loop out in threads of this process.
"""
