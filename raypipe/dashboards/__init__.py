"""Boards for Grafana and alerts for Prometheus, as files that ``raypipe dashboards install`` writes.

The JSON and ``rules.yaml`` beside this file are generated from the table of metrics, by ``dashboards/`` of the
repository.
"""

from raypipe.dashboards.install import install

__all__ = ["install"]
