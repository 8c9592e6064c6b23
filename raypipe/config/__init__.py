"""Configuration of a pipeline, frozen and checked once.

    fields.py, pipeline.py    every field: what it means, its default, and what it may hold
    combinations.py           fields that exclude each other
    ray.py                    Ray Train's ScalingConfig, RunConfig and CheckpointConfig: fields that have an effect

Standard library only: reading a configuration loads neither torch nor Ray.
"""
