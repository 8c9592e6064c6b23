"""Hugging Face: ``transformers.Trainer`` in a pipeline. Imported on first use, since importing transformers is slow."""

from raypipe.hf.pipelined_trainer import PipelinedSeq2SeqTrainer, PipelinedTrainer

__all__ = ["PipelinedSeq2SeqTrainer", "PipelinedTrainer"]
