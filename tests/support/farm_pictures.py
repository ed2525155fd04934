"""Run a farm of simulated boards, and draw pictures of its pages. scripts/make_web_screenshots runs this module."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from support.agents import start_process, stop_process
from support.browser import Page, find_browser
from support.models import DIGITS
from support.pictures import draw
from support.running_farms import HIL, RunningFarm, running_farm
from support.waiting import eventually

MODEL = DIGITS / "digits_cnn.onnx"
BOARD = """[board]
hw_type = "rpi5"

[labels]
chip = "a76"
room = "{name}"

[connection]
address = "{address}"
"""
# One job fails and one job is slow, so that the pages show something.
FAULTS = {
    "attic": [],
    "cellar": [],
    "garage": ["--fault", "corrupt:output=logits,others=spare"],
    "kitchen": ["--fault", "pace:seconds=0.05"],
}


def main() -> None:
    """Draw the pictures."""
    folder = Path(tempfile.mkdtemp(prefix="hil-lab-"))
    agents = []
    for name, faults in FAULTS.items():
        agent, address = start_process("hil.sim", f"unix:{folder}/{name}.sock", folder / name, *faults)
        agents.append(agent)
        (folder / f"{name}.toml").write_text(BOARD.format(name=name, address=address))
    boards = [word for name in FAULTS for word in ("--board", str(folder / f"{name}.toml"))]
    # Owner of the farm, who is not a user of the machine that draws.
    environment = {**os.environ, "HOME": str(folder), "LOGNAME": "ada", "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"HIL_CACHE_DIR": str(folder / "cache")}
    try:
        with running_farm("--site", "lab", *boards, environment=environment) as farm:
            at_work(farm, folder)
    finally:
        for agent in agents:
            stop_process(agent)
        shutil.rmtree(folder, ignore_errors=True)


def at_work(farm: RunningFarm, folder: Path) -> None:
    """Submit jobs of two users: some have ended, one runs, and some wait for this job or for leased boards."""
    ben = farm.hil("farm", "token", "add", "ben", "--role", "submitter").out.strip()
    bens = {"HIL_FARM": f"unix:{farm.home}/gateway.sock", "HIL_FARM_TOKEN": ben}
    assert Path(bens["HIL_FARM"].removeprefix("unix:")).exists()
    for board in ("kitchen", "garage", "attic"):
        farm.hil("farm", "submit", MODEL, "--board", board, "--wait")
    farm.hil("farm", "drain", "attic", "--reason", "new cable")
    hold = [*HIL, "farm", "lease", "--select", "room=cellar", "--for", "30m", "--", "sleep", "600"]
    with subprocess.Popen(hold, env={**farm.environment, **bens}, cwd=farm.home) as held:
        try:
            farm.eventually(lambda: all(one["job"] for one in boards_of(farm) if one["name"] == "cellar"))
            suite = ("--suite", "--filter", "*_layer_*", "--iterations", "100", "--board", "kitchen")
            running = str(farm.hil("farm", "submit", MODEL, *suite, "--json").document["submission"])
            farm.hil("farm", "submit", MODEL, "--board", "kitchen")
            farm.environment |= bens
            farm.hil("farm", "submit", MODEL, "--select", "room in (kitchen, cellar)", "--priority", "high")
            farm.hil("farm", "submit", MODEL, "--board", "attic", "--priority", "low")
            for name in bens:
                del farm.environment[name]
            pictures(farm, folder, running)
        finally:
            held.terminate()


def boards_of(farm: RunningFarm) -> list[dict[str, Any]]:
    return list(farm.hil("farm", "boards", "--json").document["boards"])


def pictures(farm: RunningFarm, folder: Path, job: str) -> None:
    """Draw the boards, the queue, and a running job."""
    (folder / "runs").mkdir()
    words = [*HIL, "web", "--runs", str(folder / "runs"), "--farm", "local", "--port", "0"]
    with subprocess.Popen(words, env=farm.environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with Page(str(find_browser())) as page:
                page.open(address)
                base = address.partition("?")[0].rstrip("/")
                page.open(f"{base}/job?name={job}")
                eventually(lambda: len(page.texts("#cases tbody tr")) > 4)
                draw(page, "job")
                page.open(f"{base}/boards?hours=1")
                draw(page, "boards")
                page.open(f"{base}/queue?hours=1")
                draw(page, "queue")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
