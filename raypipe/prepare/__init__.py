"""Preparation of a run: from the user's arguments to a job that is ready to start. No actor is started here.

    inputs.py           data opened, model captured, planning request
    model_profile.py    seconds and bytes of every operation, from the cache or measured
    prepare.py          plan (run/plans/planning.py), stages, one trial of every optimizer
    job.py              the job: model, data and plan, ready to start
    identity.py         labels of a run in settings.json, by which a later submission is recognized as the same run
    model_code.py       labels of the code of the model in settings.json
    policies.py         when a run saves and evaluates, and which settings a resumed run takes from its earlier plan

``raypipe/preflight`` has the checks of arguments, model and data.
"""
