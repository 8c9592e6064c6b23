"""``raypipe probe``: how fast the links between the nodes of a cluster are, measured now.

raypipe probe --address auto                     a table
raypipe probe --address auto -o cluster.yaml     and a file for `raypipe plan run.yaml --cluster cluster.yaml`
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli.common import check_output, write
from raypipe.cli.doctor import port_range
from raypipe.errors import ConfigError

__all__ = ["probe"]


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

    from raypipe.runfile.measured import cluster_text
    from raypipe.runtime.driver.knock import knock
    from raypipe.runtime.links.probe import places_by_node, probe_links

    try:
        knock(address)
        ray.init(address=address, namespace="raypipe", logging_level="ERROR", log_to_driver=False)
    except (ray.exceptions.AuthenticationError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"No connection to {address}: {' '.join(str(error).split())}") from None
    try:
        found = probe_links(port_range(ports), inside=output is not None)
        places = places_by_node()
    finally:
        ray.shutdown()
    if output is not None:
        write(output, cluster_text(places, found))
    if as_json:
        typer.echo(json.dumps([link._asdict() for link in found]))
        return
    typer.echo(f"{'from':<18}{'to':<18}{'latency':>12}{'bandwidth':>18}")
    for link in found:
        mbit = link.bandwidth_bytes_s * 8e-6
        typer.echo(f"{link.source:<18}{link.target:<18}{link.latency_s * 1e3:>9.2f} ms{mbit:>11.0f} Mbit/s")
    if output is not None:
        typer.echo(f"wrote {output}")
