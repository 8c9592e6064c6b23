"""Hugging Face: ``transformers.Trainer`` and TRL's trainers in a pipeline.

Imported on first use, since importing transformers is slow. trl is imported when one of its trainers is used.
"""

from typing import Any

from raypipe.hf.pipelined_trainer import PipelinedSeq2SeqTrainer, PipelinedTrainer

__all__ = [
    "PipelinedDPOTrainer", "PipelinedRewardTrainer", "PipelinedSFTTrainer", "PipelinedSeq2SeqTrainer",
    "PipelinedTrainer",
]  # fmt: skip

_GENERATES = (
    "generates answers with the weights of each step. Generate them between two trainings, and train on them with "
    "PipelinedSFTTrainer or PipelinedDPOTrainer"
)
_EXPERIMENTAL = "is experimental. Train with PipelinedDPOTrainer, or override compute_loss of PipelinedTrainer"
_OTHERS = {
    "KTO": "compares each answer with others of its batch, for which it runs the model a second time. Make pairs of "
    "answers, and train with PipelinedDPOTrainer",
    "GRPO": _GENERATES,
    "RLOO": _GENERATES,
    "Distillation": _GENERATES,
    "ORPO": _EXPERIMENTAL,
    "CPO": _EXPERIMENTAL,
}
"""Trainers of TRL that have no pipeline -> reason and what to use instead."""


def __getattr__(name: str) -> Any:
    if (reason := _OTHERS.get(name.removeprefix("Pipelined").removesuffix("Trainer"))) is not None:
        raise AttributeError(f"raypipe.hf has no {name}: TRL's trainer {reason}.")
    if name not in __all__:
        raise AttributeError(f"module 'raypipe.hf' has no attribute {name!r}")
    try:
        from raypipe.hf import trl_trainers
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError(
            f"raypipe.hf.{name} needs trl, which is not installed. Run: pip install 'raypipe[hf]'"
        ) from None
    return getattr(trl_trainers, name)
