"""What people call: make a trainer, run it, watch it, use what it trained.

    PipelineTrainer(model, ...)            trainer.py    plan, fit, start, evaluate, predict
          |            ^
          |            +-- run.yaml        from_file.py  targets imported, Ray's settings made
          v
    launch.py  -->  actors or threads      runtime/, engine/local.py
          |
          v
      RunHandle                            handle.py     news, stop, checkpoint, result; attach(name)
                                           notebook.py   what cells show, and the view that is updated in place
                                           records.py    one record per step, however many

Beside a run: ``beside.py`` (evaluate and predict), ``init_from.py`` (weights to begin with), ``export.py`` (a
checkpoint for other libraries), ``listing.py`` (runs by their folders), ``signals.py`` (Ctrl-C and SIGTERM).
"""
