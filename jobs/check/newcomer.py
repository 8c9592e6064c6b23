"""A newcomer's path from the README to a fine-tuned model, each step carried out and printed with its result.

    python jobs/check/newcomer.py                    on a cluster of its own on this machine
    python jobs/check/newcomer.py --clone            in a clean clone, beginning with its `make train`
    python jobs/check/newcomer.py --only report hf   some steps, and the steps that they need
    python jobs/check/newcomer.py --pictures DIR     draws the boards in both themes, with matplotlib

train      README's command: a small language model on two stages
report     `raypipe report` writes one file; a headless Chromium opens it, clicks, and finds nothing to complain about
job        the same job by `ray job submit`, to a cluster with a token
notebook   quickstart.ipynb, all cells in a kernel of its own
boards     `raypipe dashboards install`; a real Prometheus scrapes the job: every panel's query, every alert's measure
           has an answer, and no alert fires
hf         a model of Hugging Face, made here, trained by LoRA on two stages; loaded again it gives equal logits

Needs prometheus and chromium. The exit status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from dashboards.alerts import ALERTS
from dashboards.boards import BOARDS
from dashboards.render import ask, draw, lines_of, rules_of, step_between
from jobs.lib.common import table
from tests.browser import opened
from tests.jobs.test_finetune_hf import model_folder, texts
from tests.lab.network import ROOT
from tests.runtime.raylets import RAY, TOKEN, Home, free_port, private_cluster

TRAIN = ("jobs/train/lm.py", "--corpus-bytes", "400000", "--width", "64", "--context", "64")
LIMIT_S = 1800.0
PATIENCE_S = 120.0


@dataclass
class Newcomer:
    """Place of the newcomer: folders, the cluster, and Prometheus.

    Attributes:
        source: folder of the repository.
        folder: for everything that is written.
        python: that has raypipe.
        home: home of the cluster; None before it is needed.
        prometheus: its address.
        begun_s: when the job was submitted, Unix seconds; 0 before that.
        pictures: folder for pictures of the boards; None draws none.
    """

    source: Path
    folder: Path
    python: str
    home: Home | None = None
    prometheus: str = ""
    begun_s: float = 0.0
    pictures: Path | None = None

    @property
    def run(self) -> Path:
        """Train with README's command."""
        return self.folder / "runs" / "first"

    def call(self, *command: str, cluster: bool = False) -> str:
        """Return the output of a command.

        Raises:
            RuntimeError: the command failed; the error has the end of its output.
        """
        environment = {**os.environ, "PYTHONPATH": str(self.source), "HF_HUB_OFFLINE": "1"}
        if cluster:
            assert self.home is not None
            url = f"http://{self.home.head}:{self.home.dashboard_port}"
            environment |= {**TOKEN, "RAY_ADDRESS": self.home.address, "RAY_API_SERVER_ADDRESS": url}
        print("$", " ".join(command), flush=True)
        done = subprocess.run(
            command, cwd=self.source, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        return done.stdout


def train(at: Newcomer) -> str:
    if at.source != ROOT:
        at.call("make", "train")
    said = at.call(at.python, *TRAIN, *_folders(at, "first"), "--steps", "30")
    return next(line for line in said.splitlines() if line.startswith("held-out loss"))


def report(at: Newcomer) -> str:
    if not at.run.exists():
        train(at)
    at.call(at.python, "-m", "raypipe.cli", "report", str(at.run))
    with opened(at.run / "report.html", "dark") as (page, complaints):
        page.locator(".rp-plot rect.rp-F").first.click()
        told = page.locator(".picked").inner_text()
        pictures = page.locator("svg.rp").count()
    if complaints or not told:
        raise RuntimeError(f"the report complains: {complaints}")
    return f"{pictures} pictures, an empty console; a click shows: {told.splitlines()[0]}"


def job(at: Newcomer) -> str:
    at.begun_s = time.time()
    command = [RAY, "job", "submit", "--working-dir", ".", "--", at.python, *TRAIN, *_folders(at, "submitted")]
    said = at.call(*command, "--steps", "200", cluster=True)
    if "held-out loss of this model" not in said:
        raise RuntimeError(f"the job printed no loss: {said[-800:]}")
    return f"SUCCEEDED, {len(list((at.folder / 'runs/submitted/checkpoints').iterdir()))} checkpoint in its folder"


def notebook(at: Newcomer) -> str:
    kernel = "from nbclient import execute; import nbformat, sys; n = nbformat.read(sys.argv[1], 4); "
    run = (
        "execute(n, cwd=sys.argv[2], timeout=600); print(sum(len(c.outputs) for c in n.cells if c.cell_type == 'code'))"
    )
    file = str(at.source / "jobs/notebooks/quickstart.ipynb")
    outputs = at.call(at.python, "-c", kernel + run, file, str(at.folder), cluster=True)
    return f"all cells ran, {outputs.split()[-1]} outputs; run folder {at.folder / 'runs/quickstart'}"


def boards(at: Newcomer) -> str:
    if not at.begun_s:
        job(at)
    missing, answered, end_s = [], 0, time.time()
    for board in BOARDS:
        for panel in board.panels:
            lines = lines_of(panel, at.prometheus, ".+", at.begun_s, end_s)
            answered += bool(lines)
            missing += [] if lines or panel.needs else [f"{board.title}: {panel.title}"]
    if at.pictures is not None:
        at.pictures.mkdir(parents=True, exist_ok=True)
        for board in BOARDS:
            for theme in ("light", "dark"):
                picture = at.pictures / f"{board.uid}-{theme}.png"
                draw(board, at.prometheus, ".+", at.begun_s, end_s, picture, dark=theme == "dark")
    missing += alerts(at, end_s)
    if missing:
        raise RuntimeError(f"no data for {'; '.join(missing)}")
    asked = sum(len(board.panels) for board in BOARDS)
    told = f"{answered} of {asked} panels have data; the others need what did not happen, a failure for one"
    return f"{told}; {len(ALERTS)} alerts are evaluated, and none fires"


def alerts(at: Newcomer, end_s: float) -> list[str]:
    """List faults of the alerts: not evaluated, nothing to measure though the run trained, or a false alarm."""
    rules, wrong = rules_of(at.prometheus), []
    span = {"start": at.begun_s, "end": end_s, "step": step_between(at.begun_s, end_s)}
    for alert in ALERTS:
        rule = rules.get(alert.name, {"health": "missing", "state": ""})
        if rule["health"] != "ok":
            wrong.append(f"{alert.name}, which is {rule['health']}: {rule.get('lastError', '')}")
        elif rule["state"] == "firing":
            wrong.append(f"{alert.name}, which fires for a run that trains as it should")
        elif not alert.needs and not ask(at.prometheus, "query_range", query=alert.measure, **span):
            wrong.append(f"{alert.name}, which measures nothing")
    return wrong


def hf(at: Newcomer) -> str:
    model_folder(at.folder / "gpt2", "gpt2")
    texts(at.folder / "texts.jsonl", label=False, target=False)
    files = ["--model", str(at.folder / "gpt2"), "--data", str(at.folder / "texts.jsonl")]
    sizes = ["--steps", "6", "--length", "12", "--minibatch-size", "4", "--microbatches", "2", "--lora-rank", "2"]
    where = ["--output", str(at.folder / "adapter"), "--storage", str(at.folder / "runs"), "--name", "tuned"]
    said = at.call(at.python, "jobs/train/finetune_hf.py", *files, *sizes, *where, "--stages", "2", cluster=True)
    return next(line for line in said.splitlines() if line.startswith("saved"))


STEPS: dict[str, Callable[[Newcomer], str]] = {
    "train": train, "report": report, "job": job, "notebook": notebook, "boards": boards, "hf": hf,
}  # fmt: skip
ON_CLUSTER = ("job", "notebook", "boards", "hf")


def _folders(at: Newcomer, name: str) -> list[str]:
    return ["--data", str(at.folder / "data"), "--storage", str(at.folder / "runs"), "--name", name]


@contextlib.contextmanager
def cluster(at: Newcomer, folder: Path) -> Iterator[None]:
    """Start a head with a token, and a Prometheus that `raypipe dashboards install` has configured."""
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("there is no prometheus on this machine: apt-get install prometheus")
    with private_cluster() as home, contextlib.ExitStack() as stack:
        quick = {"RAY_metrics_report_interval_ms": "1000", "RAY_worker_niceness": "0"}
        home.start(cpus=4, dashboard=True, environment={**TOKEN, **quick})
        at.home, port = home, free_port()
        discovery = home.folder / "prom_metrics_service_discovery.json"
        install = [at.python, "-m", "raypipe.cli", "dashboards", "install", str(folder)]
        at.call(*install, "--discovery", str(discovery))
        config = folder / "prometheus" / "prometheus.yml"
        config.write_text(config.read_text().replace("10s", "1s"))  # this run is short
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        log = stack.enter_context((folder / "prometheus.log").open("wb"))
        listening = [f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen([program, *options, *listening], stdout=log, stderr=log)
        stack.callback(process.wait, 60)
        stack.callback(process.terminate)
        at.prometheus = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + PATIENCE_S
        while not _scrapes(at.prometheus):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"Prometheus found no node of {discovery} within {PATIENCE_S:.0f} s")
            time.sleep(1.0)
        yield


def _scrapes(prometheus: str) -> bool:
    with contextlib.suppress(OSError):
        return any(one["value"][1] == "1" for one in ask(prometheus, "query", query="up"))
    return False


def clone(folder: Path) -> Path:
    """Clone the committed state."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=LIMIT_S)
    return folder


def main() -> int:
    """Return exit status 1 if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", action="store_true", help="in a clean clone with an environment of its own")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw the boards there; needs matplotlib")
    asked = parser.parse_args()
    rows, failed = [], False
    with tempfile.TemporaryDirectory(prefix="raypipe-newcomer-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        source = clone(folder / "clone") if asked.clone else ROOT
        python = str(source / ".venv/bin/python") if asked.clone else sys.executable
        at = Newcomer(source, folder, python, pictures=asked.pictures)
        for name in asked.only:
            began_s = time.monotonic()
            try:
                if name in ON_CLUSTER and at.home is None:
                    stack.enter_context(cluster(at, folder / "boards"))
                found = STEPS[name](at)
            except Exception as error:  # noqa: BLE001  (every step is told, whatever becomes of those before)
                found, failed = f"FAILED: {error}", True
            print(f"{name}: {found}", flush=True)
            rows.append((name, f"{time.monotonic() - began_s:.0f}", found.splitlines()[0][:110]))
    print(table("a newcomer's path", ("step", "s", "what it gave"), rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
