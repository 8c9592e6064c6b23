"""Make what `raypipe dashboards install` installs: Grafana's JSON of the boards, and the rules of the alerts.

    python -m dashboards.generate           after a change of boards.py, alerts.py or the table of metrics

The files are committed in ``raypipe/dashboards``, so that an installed raypipe has them; a test
generates them once more and compares.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from grafana_foundation_sdk.builders import common as shapes
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, VariableOption, VariableRefresh

from dashboards.alerts import ALERTS
from dashboards.boards import BOARDS, Board, Panel

__all__ = ["board_json", "generated", "main", "rules"]

FOLDER = Path(__file__).resolve().parents[1] / "raypipe" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = {True: 4, False: 8}
"""Of a panel with one number, and of one with lines, in rows of Grafana's grid."""


def board_json(board: Board) -> str:
    """The board as Grafana reads it."""
    made = (
        grafana.Dashboard(board.title)
        .uid(board.uid)
        .description(board.meaning)
        .tags(["raypipe"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .readonly()
        .with_variable(grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            grafana.QueryVariable("run")
            .label("Run")
            .datasource(SOURCE)
            .query("label_values(ray_raypipe_running, run)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".+")
            .current(VariableOption(selected=True, text="All", value="$__all"))
        )
        .link(
            grafana.DashboardLink("raypipe")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["raypipe"])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for panel in board.panels:
        made = made.with_panel(_panel(panel))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made: stat.Panel | timeseries.Panel
    if panel.stat:
        made = stat.Panel().reduce_options(shapes.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    else:
        legend = shapes.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        made = timeseries.Panel().legend(legend.show_legend(True)).axis_soft_min(0).line_width(2).fill_opacity(0)
        made = made.show_points("auto")  # type: ignore[arg-type]
    made = made.title(panel.title).description(panel.meaning + _needs(panel)).unit(panel.unit).datasource(SOURCE)
    made = made.span(panel.width).height(HEIGHT[panel.stat])
    for place, query in enumerate(panel.queries):
        asked = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        made = made.with_target(asked.ref_id(chr(ord("A") + place)).datasource(SOURCE).range())
    return made


def _needs(panel: Panel) -> str:
    return f" Empty without {panel.needs}." if panel.needs else ""


def rules() -> str:
    """The alerts as Prometheus reads them."""
    made = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.cure},
        }
        for alert in ALERTS
    ]
    return yaml.safe_dump({"groups": [{"name": "raypipe", "rules": made}]}, sort_keys=False, width=1000)


def generated() -> dict[str, str]:
    """All files, by their names below ``raypipe/dashboards``."""
    return {f"{board.uid}.json": board_json(board) for board in BOARDS} | {"rules.yaml": rules()}


def main() -> None:
    for name, text in generated().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
