"""``raypipe dashboards install DIR``: boards for Grafana, alerts for Prometheus, and how both find a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Boards for Grafana and alerts for Prometheus.")


@app.callback()
def root() -> None:
    """Boards for Grafana and alerts for Prometheus."""


@app.command()
def install(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to write; made if need be")],
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="where Grafana finds Prometheus")
    ] = "http://localhost:9090",
    discovery: Annotated[
        str, typer.Option(metavar="FILE", help="where the head of the Ray cluster lists its nodes for Prometheus")
    ] = "",
) -> None:
    """Write boards, alerts, and settings of Grafana, Prometheus and KubeRay into a folder. Nothing is started."""
    from raypipe.dashboards.install import DISCOVERY
    from raypipe.dashboards.install import install as write

    written = write(folder, prometheus, discovery or DISCOVERY)
    typer.echo(f"wrote {len(written)} files to {folder}; use those that you need:")
    for line in _NEXT:
        typer.echo(line.format(folder=folder))


_NEXT = (
    "  prometheus --config.file={folder}/prometheus/prometheus.yml",
    "  GF_PATHS_PROVISIONING={folder}/grafana/provisioning grafana server --homepath GRAFANA",
    "  kubectl apply -f {folder}/kuberay",
)
