"""Everything between the user's arguments and the first actor. Nothing is started here.

    model, loss, data, config
          |
          v
      inputs.py            data opened, model captured, what was asked for
          |
          v
    loss_reduction.py      what the loss averages over, tried on real rows
          |
          v
      profile.py           seconds and bytes of every operation, from the cache or measured
          |
          v
     planning.py           plan, stage programs, one trial of every optimizer  -->  job.py: ready to start

``arguments.py`` refuses what can be refused at once, ``identity.py`` says what a run is for settings.json,
``resume.py`` what an earlier run of the same name left.
"""
