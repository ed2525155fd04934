"""Test how a worker switches its board's power for users."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.waiting import eventually

from hil.controller.farm.host.power_switch import PowerSwitch
from hil.core.board_config import Command, Power
from hil.errors import BoardUnreachable, ProvisionFailed
from hil.protocol.v1 import farm_pb2 as pb


def hook(code: str) -> Command:
    return Command((sys.executable, "-c", code))


class Worker:
    """Worker's power switch, with a log file that the hooks write."""

    def __init__(self, folder: Path, **hooks: Command) -> None:
        self.log, self.leases, self.reports = folder / "log", set[int](), list[tuple[str, str]]()
        self.probed = 0
        add = f"open({str(self.log)!r}, 'a').write({{!r}})"
        usual = {action: hook(add.format(action + " ")) for action in ("on", "off")}
        power = Power({**usual, **hooks}, delay=0.01, boot_s=5.0)
        self.switch = PowerSwitch(
            "pi",
            lambda: SimpleNamespace(power=power),
            lambda: self.leases,
            lambda *one: self.reports.append(one),
            self.probe,
            self.write_image,
        )

    def write_image(self, request: pb.SwitchPower) -> None:
        assert self.switch.is_writing
        self.log.write_text(f"{request.file} {request.image}")
        if "bad" in request.file:
            raise ProvisionFailed("the provision command failed", detail="line 1\nno space left\n")

    def probe(self, config: Any) -> None:
        self.probed += 1
        if self.probed < 2:
            raise BoardUnreachable("booting")

    def ask(self, action: str, id: str = "1", **request: Any) -> str:
        before = len(self.reports)
        self.switch.handle(pb.SwitchPower(id=id, action=action, **request))
        eventually(lambda: len(self.reports) > before)
        assert self.reports[-1][0] == id
        return self.reports[-1][1]

    def done(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def test_cycle_switches_off_and_on_and_waits_for_boot(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert (worker.ask("cycle"), worker.done(), worker.probed) == ("", "off on ", 2)


def test_off_does_not_wait_for_board(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert (worker.ask("off"), worker.done(), worker.probed) == ("", "off ", 0)


def test_repeated_request_repeats_report_but_not_action(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert worker.ask("off") == worker.ask("off") == ""
    assert worker.done() == "off "
    assert worker.ask("off", "2") == "" and worker.done() == "off off "


def test_board_with_new_job_is_left_alone(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.leases = {7}
    assert worker.ask("off", "1") == "a job has started on the board"
    assert worker.ask("off", "2", lease=8) == "a job has started on the board"
    assert worker.done() == ""
    assert worker.ask("off", "3", lease=7) == worker.ask("off", "4", force=True) == ""


def test_power_of_own_lease_does_not_connect_to_board(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.leases = {7}
    assert (worker.ask("on", lease=7), worker.probed) == ("", 0)


def test_failed_command_is_reported(tmp_path: Path) -> None:
    worker = Worker(tmp_path, off=hook("import sys; sys.exit(3)"))
    assert worker.ask("off") == "the off command failed with exit code 3"


def test_second_action_is_refused_while_first_runs(tmp_path: Path) -> None:
    worker = Worker(
        tmp_path,
        off=hook(f"import time, pathlib\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)"),
    )
    worker.switch.handle(pb.SwitchPower(id="1", action="off"))
    assert worker.ask("on", "2") == "a different power action or image is running"
    (tmp_path / "go").touch()
    worker.switch.close(10)
    assert worker.reports[-1] == ("1", "")


def test_image_is_written_unless_job_has_started(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert (worker.ask("provision", file="card.img", image="sha256:1"), worker.done()) == ("", "card.img sha256:1")
    assert worker.ask("provision", "2", file="bad.img") == "the provision command failed: line 1 no space left"
    assert not worker.switch.is_writing
    worker.leases = {7}
    assert worker.ask("provision", "3", file="x.img") == "a job has started on the board"
    assert worker.done() == "bad.img "
