"""Configuration of a pipeline, frozen and checked once.

    fields.py             every field: what it means, its type and its default
        |
    combinations.py       fields that exclude each other
        |
    PipelineConfig(...)   pipeline.py   what each field may hold, and whether this release runs it

    Ray Train's ScalingConfig, RunConfig and CheckpointConfig   ray.py   fields that have an effect; others are refused

Standard library only: reading a configuration loads neither torch nor Ray.
"""
