"""Paths as users write them: what is replaced, what is refused, and where relative ones lead in a Ray job."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.config.paths import absolute_path, expanded, job_copy
from raypipe.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    monkeypatch.setenv("HOME", str(made))
    return made


def submitted(folder: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a job: Ray unpacks its working directory in a folder that is named after the content."""
    copy = folder / "session_x" / "runtime_resources" / "working_dir_files" / f"_ray_pkg_{content}"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("text", ["~/x/y", "$HOME/x/y", "${HOME}/x/y", "$PART/y", "x/y"])
def test_every_way_to_write_a_path_is_the_same_path(
    text: str, written: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART", str(home / "x"))
    monkeypatch.chdir(home)
    found = absolute_path(text, written=written)
    assert found == str(home / "x" / "y")
    assert absolute_path(found, written=written) == found


def test_variables_of_an_address_are_replaced_and_the_rest_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", "mine")
    address = "s3://$BUCKET/~/a?endpoint_override=http://host:9000&region=r"
    assert absolute_path(address, written=True) == expanded(address) == address.replace("$BUCKET", "mine")


@pytest.mark.parametrize("text", ["$NOT_SET/x", "${NOT_SET}/x", "s3://$NOT_SET/x", "/data/$NOT_SET"])
def test_an_unset_variable_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"names the variable \$NOT_SET, which is not set\. Set NOT_SET"):
        absolute_path(text)


def test_a_home_folder_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="no user whose home folder ~nobody-of-this-name/x could be in"):
        absolute_path("~nobody-of-this-name/x")


@pytest.mark.parametrize(
    "address",
    [
        "s3://AKIA:hunter2@bucket/runs",
        "s3://bucket/runs?access_key=AKIA&secret_key=hunter2",
        "s3://bucket/runs?session_token=hunter2",
        "s3://bucket/runs?endpoint_override=http://me:hunter2@host",
        "abfs://account.blob.core.windows.net/c/p?client_secret=hunter2",
    ],
)
def test_credentials_are_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ConfigError, match=r"AWS_SECRET_ACCESS_KEY.*every node") as refused:
        absolute_path(address)
    assert "hunter2" not in str(refused.value)


def test_a_user_without_a_password_is_no_credential() -> None:
    address = "gs://anonymous@bucket/x?scheme=http&endpoint_override=localhost:1"
    assert absolute_path(address) == address


def test_what_a_job_writes_is_the_same_whatever_its_folder_holds(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """...and found again: relative paths are looked for in what was submitted, then where runs are written."""
    first = submitted(tmp_path, "0a", monkeypatch)
    assert job_copy(first / "runs") == first
    kept = absolute_path("runs", written=True)
    second = submitted(tmp_path, "0b", monkeypatch)
    assert absolute_path("runs", written=True) == kept == str(home / "ray_results" / "runs")
    assert absolute_path("runs") == str(second / "runs")  # nothing is there yet
    Path(kept).mkdir(parents=True)
    assert absolute_path("runs") == kept
    (second / "runs").mkdir()
    assert absolute_path("runs") == str(second / "runs")
    assert absolute_path("runs", written=True) == kept


def test_a_job_does_not_write_into_its_copy(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = submitted(tmp_path, "0a", monkeypatch)
    with pytest.raises(ConfigError, match=r"_ray_pkg_0a, Ray's copy of .* would begin anew\. Give a relative path"):
        absolute_path(str(copy / "runs"), written=True)
    assert absolute_path(str(tmp_path / "runs"), written=True) == str(tmp_path / "runs")
