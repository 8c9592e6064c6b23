"""Public API: create a trainer, run it, watch the run, use the trained model.

    PipelineTrainer(model, ...)            trainer.py    plan, fit, start, evaluate, predict
          |            ^
          |            +-- run.yaml        from_file.py  imports targets, builds Ray's settings
          v
    actors or threads                      runtime/, engine/local.py
          |
          v
      RunHandle                            handle.py     status, metrics, stop, checkpoint, wait; attach(name)
                                           notebook.py   HTML for cells, and a view that is updated in place
                                           result.py     result of a run, one record per step
                                           listing.py    list of runs, by their folders

Further modules: ``evaluate.py`` (evaluate and predict), ``initial_weights.py`` (weights with which a new run begins),
``export.py`` (a checkpoint for other libraries), ``callbacks.py`` (callbacks of the trainer and of Ray Train),
``devices.py`` (GPUs as known when a run is planned), ``signals.py`` (Ctrl-C, SIGTERM, SIGHUP).
"""
