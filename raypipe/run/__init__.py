"""Training loop of a run, without Ray: the same for stages in actors and in threads.

    plans/blueprint.py  blueprint (independent of the plan) --+--> assemble: programs, setup, schedules, the
                        plan                                --+    controller's configuration

    requests.py  begin, stop, save  --+
                                      v
    same_run.py  start position -->  loop.py  -->  orders of one or several steps for the stages: ordering.py
                                      |  ^
            controller_thread.py <----+  +---- reports
            checkpoints.py, evaluations.py
            stage_changes.py   recovery from a failure, resize, move: transitions.py, position.py
            reporting.py   events.jsonl, alerts, callbacks
            journal.py     status and newest records, for any number of readers

An *order* is a command to all stages to run one or several mini-batches. A *submission* is one call of fit or start. A
*generation* is the number of a plan. ``lease.py`` ensures that one process at a time trains a run. ``same_run.py``
refuses to resume a run whose settings differ. ``threads.py`` runs the loop in a thread of this process.
"""
