"""A bucket of S3 with its endpoint in the address: what a run prints and returns is enough to come back to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest
import torch
from typer.testing import CliRunner

import raypipe
from raypipe.cli import app
from raypipe.starter import write

moto = pytest.importorskip("moto.server", reason="moto[server] is not installed, so there is no S3 to talk to")

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a folder in a bucket of a server of its own."""
    for name, value in {"ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "hunter2", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        pyarrow.fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1", allow_bucket_creation=True).create_dir(
            "bucket"
        )
        yield "s3://bucket/my runs?region=us-east-1&endpoint_override=".replace(" ", "%20") + endpoint
    finally:
        server.stop()


def test_every_address_can_be_passed_back(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)

    def said(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def trained(name: str, *more: str) -> dict[str, str]:
        settings = [f"run_config.name={name}", f"run_config.storage_path={bucket}", "num_steps=3", *more]
        lines = said("train", "run.yaml", "--local", *(word for s in settings for word in ("--set", s))).splitlines()
        return {key: line.removeprefix(key).strip() for line in lines for key in ("run folder", "checkpoint")
                if line.startswith(key)}  # fmt: skip

    run = trained("lm")
    folder, checkpoint = run["run folder"], run["checkpoint"]
    assert folder == bucket.replace("?", "/lm?")
    assert f"lm: finished; all steps done; step 3; checkpoint {checkpoint}" in said("status", folder)
    assert said("list", bucket).splitlines()[-1].endswith(folder)
    assert said("report", folder) == f"wrote {folder.replace('?', '/report.html?')}\n"
    assert said("export", folder, "-o", "model.safetensors") == "wrote model.safetensors\n"
    assert said("export", checkpoint, "-o", "same.safetensors") == "wrote same.safetensors\n"
    assert Path("model.safetensors").read_bytes() == Path("same.safetensors").read_bytes()

    result = raypipe.Result.from_path(folder)
    assert (result.path, result.checkpoint) == (folder, checkpoint)
    assert result.get_best_checkpoint("loss", "min") == checkpoint
    state = raypipe.load_state_dict(result.checkpoint)
    again = trained("next", f"init_from={folder}", "optimizer.args.lr=0.0")
    begun = raypipe.load_state_dict(again["checkpoint"])
    assert all(torch.equal(value, begun[name]) for name, value in state.items())
    monkeypatch.delitem(sys.modules, "model")
