"""What a person may choose, frozen and checked once.

    PipelineConfig(...)   pipeline.py   every field: its type, range, default, and whether this release runs it
           |
           v
       checks.py          fields that are possible alone and at odds together

    Ray Train's ScalingConfig, RunConfig and CheckpointConfig   ray.py   fields that have an effect; others are refused

Standard library only: reading a configuration loads neither torch nor Ray.
"""
