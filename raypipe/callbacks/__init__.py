"""Callbacks: methods of yours that a run calls while it trains (base.py), and three loggers (loggers.py).

    run_loop --> CallbackThread (run/reporting.py) --> Callback.on_step ...

The methods are called in the process that runs the loop: the driver actor of a run on Ray, this process with
``local=True`` (docs/design/0048).
"""

from raypipe.callbacks.base import Callback, Event, Prompts, RunEnd, RunStart, scalars
from raypipe.callbacks.loggers import MLflow, TensorBoard, WandB

__all__ = ["Callback", "Event", "MLflow", "Prompts", "RunEnd", "RunStart", "TensorBoard", "WandB", "scalars"]
