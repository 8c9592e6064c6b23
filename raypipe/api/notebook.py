"""HTML of a run and of its result for notebooks, and a view of a run that is updated in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from raypipe.ir.units import human_price
from raypipe.progress import say
from raypipe.run.status import Alert, RunStatus
from raypipe.viz.chart import Line, chart_svg

Points = Sequence[tuple[float, float]]


def run_html(status: RunStatus, losses: Points) -> str:
    """Render the status of a run as HTML: name, state, progress bar, a table, and a chart of the loss.

    Args:
        losses: (number of the step from 1, loss) of the newest steps.
    """
    share = status.step / status.num_steps if status.num_steps else 0.0
    minutes, seconds = divmod(round(status.seconds_left), 60)
    rows = {
        "step": f"{status.step:,} of {status.num_steps:,}" if status.num_steps else "",
        "samples per second": f"{status.samples_per_s:,.0f}",
        "tokens per second": f"{status.tokens_per_s:,.0f}" if status.tokens_per_s else "",
        "learning rate": f"{status.lr:.3g}" if status.lr else "",
        "workers idle": f"{status.bubble_fraction:.0%}",
        "goodput": f"{status.goodput:.1%}" if status.goodput else "",
        "left": f"{minutes}:{seconds:02d}" if status.state == "running" and status.step_s else "",
        "schedule": f"{status.schedule}, retuned {status.retunes} times" if status.schedule else "",
        "cost so far": "" if status.cost is None else human_price(status.cost),
        "last recovery": status.recovery,
        "checkpoint": status.checkpoint,
        "alerts": "; ".join(map(str, status.alerts)),
        "message": (status.message.splitlines() or [""])[0],
    }
    workers = ", ".join(f"{stage.get('host', '?')}:{stage.get('process', '?')}" for stage in status.stages)
    return (
        f"<p><b>{escape(status.name)}</b>: {escape(status.state)} "
        f'<progress value="{share:.4f}" max="1" style="width:20em"></progress></p>'
        f"{_table({**rows, 'workers': workers})}{_loss(losses, status)}"
    )


def result_html(
    metrics: Mapping[str, Any], losses: Points, path: str, stopped: str, alerts: Sequence[Alert] = ()
) -> str:
    """Render the result of a run as HTML.

    Args:
        metrics, path, stopped, alerts: see ``Result``.
        losses: (number of the step from 1, loss) of all steps.
    """
    numbers = {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in metrics.items()
        if value not in ("", False, None)
    }
    rows = {
        **numbers,
        "stopped": stopped,
        "alerts": "; ".join(map(str, alerts)),
        "folder": path,
        "report": f"raypipe report {path}",
    }
    chart = chart_svg([Line("loss", losses)], "Loss", "step", "loss")
    return f"{_table(rows)}{chart}"


def _loss(losses: Points, status: RunStatus) -> str:
    whole = (1.0, float(max(status.num_steps, 2)))
    return chart_svg([Line("loss", losses)], "Loss", "step", "loss", span=whole if status.step <= len(losses) else None)


def _table(rows: Mapping[str, str]) -> str:
    cells = "".join(
        f'<tr><td style="text-align:left">{escape(name)}</td><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows.items()
        if value
    )
    return f"<table>{cells}</table>"


class LiveView:
    """View of a run that is updated: HTML in one cell of a notebook, lines of text elsewhere."""

    def __init__(self) -> None:
        self._cell: Any = None
        self._said = ""

    def show(self, html: str, text: str) -> None:
        """Replace the HTML in a notebook; elsewhere print the text if it has changed.

        Args:
            html: content for a notebook.
            text: one line for standard output.
        """
        if not _in_notebook():
            if text != self._said:
                say(sys.stdout, f"{text}\n")
                self._said = text
            return
        from IPython.display import HTML, display

        if self._cell is None:
            self._cell = display(HTML(html), display_id=True)
        else:
            self._cell.update(HTML(html))


def _in_notebook() -> bool:
    """Return True if this process is a Jupyter kernel; False if IPython was not imported yet."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None
