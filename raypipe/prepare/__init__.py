"""Preparation of a run: from the user's arguments to a job that is ready to start. No actor is started here.

    inputs.py           data opened, model captured, planning request
    model_profile.py    seconds and bytes of every operation, from the cache or measured
    prepare.py          plan (run/plans/planning.py), stages, one trial of every optimizer
    job.py              ready to start
    identity.py, model_code.py    what settings.json has of a run and of the code of its model
    policies.py                   when a run saves and evaluates, and what an earlier one of the same name decides

``raypipe/preflight`` has the checks.
"""
