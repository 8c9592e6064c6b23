"""``raypipe init``, ``doctor``, ``probe`` and ``dashboards install``: files to begin with, and checks of machines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.common import check_output, open_runfile, write
from raypipe.errors import ConfigError


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to write; made if need be")] = Path(),
) -> None:
    """Write run.yaml and model.py, which train without changes. No file is replaced."""
    from raypipe.starter import write

    for path in write(folder):
        typer.echo(f"wrote {path}")
    if folder != Path():
        typer.echo(f"  cd {folder}")
    typer.echo("  raypipe plan run.yaml             # what will run, and why")
    typer.echo("  raypipe train run.yaml --local    # in threads; without --local on Ray")


def doctor(
    address: Annotated[str, typer.Option(help="of a Ray cluster that this machine is part of, or auto")] = "",
    ports: Annotated[str | None, typer.Option(metavar="LOW-HIGH", help="ports that nodes may use")] = None,
    config: Annotated[Path | None, typer.Option(help="a run's YAML file: checks what it needs")] = None,
    devices: Annotated[str, typer.Option(hidden=True, help="where device files are")] = "/dev",
) -> None:
    """Check what this machine and cluster can and cannot do. Exit status 1 if there is a problem.

    Without --address the cluster is that of RAY_ADDRESS; without both, only this machine is checked.
    """
    from raypipe.doctor.checks import examine
    from raypipe.doctor.collect import collect, requirements_of

    run = None if config is None else open_runfile(config, None)
    needs = requirements_of(run, port_range(ports))
    findings = examine(collect(address or os.environ.get("RAY_ADDRESS", ""), needs, devices), needs)
    for finding in findings:
        typer.echo(finding)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def port_range(text: str | None) -> tuple[int, int] | None:
    """Parse "LOW-HIGH" to (lowest, highest); a single port is both. Raises typer.BadParameter for any other text."""
    if text is None:
        return None
    low, _, high = text.partition("-")
    try:
        ports = int(low), int(high or low)
    except ValueError:
        ports = (0, 0)
    if not 1 <= ports[0] <= ports[1] <= 65535:
        raise typer.BadParameter(f"--ports {text} is no range: give LOW-HIGH, as in --ports 20000-20100.")
    return ports


def probe(
    address: Annotated[str, typer.Option(help="of a Ray cluster that this machine is part of, or auto")] = "",
    ports: Annotated[str | None, typer.Option(metavar="LOW-HIGH", help="ports that links may use")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="cluster file for raypipe plan --cluster")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON instead of a table")] = False,
) -> None:
    """Measure latency and bandwidth between every two nodes, over the links that a run would use.

    A run measures its own links while it trains; this is for looking at a cluster, and planning for it, beforehand.
    """
    check_output(output)
    address = address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise ConfigError("Which cluster? Give --address HOST:PORT, or set RAY_ADDRESS.")
    import ray

    from raypipe.runfile.cluster_file import cluster_text
    from raypipe.runtime.driver.ray_ping import ping_cluster
    from raypipe.runtime.transport.link_probe import places_by_node, probe_links

    try:
        ping_cluster(address)
        ray.init(address=address, namespace="raypipe", logging_level="ERROR", log_to_driver=False)
    except (ray.exceptions.AuthenticationError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"No connection to {address}: {' '.join(str(error).split())}") from None
    try:
        links = probe_links(port_range(ports), inside=output is not None)
        places = places_by_node()
    finally:
        ray.shutdown()
    if output is not None:
        write(output, cluster_text(places, links))
    if as_json:
        typer.echo(json.dumps([link._asdict() for link in links]))
        return
    typer.echo(f"{'from':<18}{'to':<18}{'latency':>12}{'bandwidth':>18}")
    for link in links:
        mbit = link.bandwidth_bytes_s * 8e-6
        typer.echo(f"{link.source:<18}{link.target:<18}{link.latency_s * 1e3:>9.2f} ms{mbit:>11.0f} Mbit/s")
    if output is not None:
        typer.echo(f"wrote {output}")


dashboards = typer.Typer(no_args_is_help=True, help="Boards for Grafana and alerts for Prometheus.")


@dashboards.callback()
def dashboards_root() -> None:
    """Boards for Grafana and alerts for Prometheus."""


@dashboards.command()
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
