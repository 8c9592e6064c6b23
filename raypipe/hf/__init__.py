"""Hugging Face: ``transformers.Trainer`` and TRL's trainers in a pipeline.

Imported on first use, since importing transformers is slow. trl is imported when one of its trainers is used.
"""

from typing import Any

from raypipe.hf.pipelined_trainer import PipelinedSeq2SeqTrainer, PipelinedTrainer

__all__ = ["PipelinedDPOTrainer", "PipelinedSFTTrainer", "PipelinedSeq2SeqTrainer", "PipelinedTrainer"]


def __getattr__(name: str) -> Any:
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
