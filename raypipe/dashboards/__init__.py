"""Boards for Grafana and alerts for Prometheus, as files that ``raypipe dashboards install`` writes.

The JSON files and ``rules.yaml`` in this folder are generated from raypipe.metrics, by ``dashboards/`` of the
repository.
"""

from raypipe.dashboards.install import install

__all__ = ["install"]
