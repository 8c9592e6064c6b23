"""Callbacks: functions of yours that a run calls while it trains, and three loggers made of them.

    run_loop --> Calls (a thread beside it) --> Callback.on_step ...      runtime/run/calls.py
                                                   |
                        base.py     Callback, and what it is told
                        tensorboard.py, mlflow.py, wandb.py     a page each

They are called in the process that runs the loop: the driver actor of a run on Ray, this process with ``local=True``;
docs/design/0049 says why. The loggers import what they write to when the run starts, and not before.
"""

from raypipe.callbacks.base import Callback, Event, RunEnd, RunStart, scalars
from raypipe.callbacks.mlflow import MLflow
from raypipe.callbacks.tensorboard import TensorBoard
from raypipe.callbacks.wandb import WandB

__all__ = ["Callback", "Event", "MLflow", "RunEnd", "RunStart", "TensorBoard", "WandB", "scalars"]
