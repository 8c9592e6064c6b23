"""The policies that bench/lv compares, as fields of PipelineConfig.

Lv et al. (CCGrid'23, doi 10.1109/CCGrid57682.2023.00031) limit the versions of the weights, compress what travels
between stages, and cut by prefix sums; their abstract tells of about twice the speed and 30 to 40 % less memory. Only
that abstract is to be had, so the numbers are ours: two versions, hence an update per mini-batch, and activations as
int8 and gradients as bf16 on the links.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LV", "POLICIES"]

CODECS = {"codec_forward": "int8", "codec_backward": "bf16"}
RING = {"schedule": "pipedream", "weight_versions": 2}
LV: dict[str, Any] = {**RING, **CODECS}
POLICIES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "pipedream": {"schedule": "pipedream"},
    "ring": RING,
    "lv": LV,
}
"""By name; "pipedream" stashes a version per micro-batch under way, as published (SOSP'19, 3.3)."""
