"""Preparation of a run: from the user's arguments to a job that is ready to start. No actor is started here.

    model, loss, data, config
          |
          v
      inputs.py            data opened, model captured, planning request
          |
          v
   preflight/loss_weighting.py   what the loss averages over, tried on real rows
          |
          v
   model_profile.py        seconds and bytes of every operation, from the cache or measured
          |
          v
     prepare.py            plan (run/plans/planning.py), stages, one trial of every optimizer
          |
          v
       job.py              ready to start

``raypipe/preflight`` has the checks. ``identity.py`` describes a run for settings.json, ``model_code.py`` describes the
code of its model. ``resume.py`` reads the plan of an earlier run of the same name. ``policies.py`` decides when a run
saves and evaluates.
"""
