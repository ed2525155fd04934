"""Test how a host runs a user's command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import eventually

from hil.controller.farm.host.inventory import HostInfo
from hil.controller.farm.host.jobs import command_job
from hil.controller.farm.host.jobs.command_job import run_command_job
from hil.controller.farm.host.lease_runner import Attempt
from hil.controller.farm.messages import Grant, JobResult, JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import decode_result, encode_result
from hil.core.digest import digest_of
from hil.errors import UsageError


class Store:
    """Farm's store: files by digest."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def download(self, digest: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(self.files[digest])

    def upload(self, files: dict[str, Path]) -> None:
        self.files |= {digest: path.read_bytes() for digest, path in files.items()}


class Host:
    """Host that runs commands, with the lines that it printed."""

    def __init__(self, folder: Path, *, allow: bool = True) -> None:
        self.folder, self.allow = folder, allow
        self.lines: list[str] = []
        self.store = Store({})
        self.print: Callable[[str], None] = self.lines.append

    def run(self, *command: str, **options: Any) -> JobResult:
        files = options.pop("files", {})
        self.store.files |= {digest_of(data): data for data in files.values()}
        named = {name: digest_of(data) for name, data in files.items()}
        spec = JobSpec(Kind.COMMAND, {"command": list(command), **options}, named)
        grant = Grant(5, "17", 17, "rpi5", 3, 6.0, 60.0, 2, spec, user="anna")
        site = HostInfo("lab", "", FarmAddress(("unix:g",), "t"), self.folder, self.folder, allow_commands=self.allow)
        attempt = Attempt(
            grant, None, "", site, self.folder / "job", lambda text: self.print(text), lambda *case: None,  # type: ignore[arg-type]
            None, lambda: self.store, {}, config=Path("/boards/rpi5.toml"), address="root@rpi5",  # type: ignore[arg-type]
        )  # fmt: skip
        return run_command_job(attempt)

    def python(self, code: str, **options: Any) -> JobResult:
        return self.run(sys.executable, "-c", code, **options)

    def kept(self, result: JobResult) -> dict[str, bytes]:
        return {path: self.store.files[digest] for path, digest in result.files.items()}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(("code", "outcome"), [(0, "PASS"), (1, "FAIL"), (4, "FAIL"), (77, "FAIL")])
def test_exit_code_of_command_is_result(host: Host, code: int, outcome: str) -> None:
    result = host.python(f"print('hello'); raise SystemExit({code})")
    assert (result.exit_code, result.outcome, result.infrastructure) == (code, outcome, False)
    assert host.lines == ["hello"] and host.kept(result) == {"output.log": b"hello\n"}
    assert result.reason == (f"the command ended with exit code {code}" if code else "")


def test_signal_of_command_is_result(host: Host) -> None:
    result = host.python("import os; os.kill(os.getpid(), 9)")
    assert (result.exit_code, result.reason) == (137, "the command was killed by SIGKILL")


def test_command_gets_board_and_no_secrets(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_FARM_TOKEN", "secret")
    monkeypatch.setenv("HIL_FARM_HOME", "/farm")
    names = "HIL_BOARD HIL_BOARD_NAME HIL_BOARD_ADDRESS HIL_FARM_JOB HIL_FARM_USER HIL_FARM_ATTEMPT"
    host.python(
        f"import os, sys\nfor name in {names.split()!r}: print(os.environ[name])\n"
        "print(os.environ.get('HIL_FARM_TOKEN'), os.environ.get('HIL_FARM_HOME'), repr(sys.stdin.read()))"
    )
    lines = "\n".join(host.lines).splitlines()
    assert lines == ["/boards/rpi5.toml", "rpi5", "root@rpi5", "17", "anna", "2", "None None ''"]


def test_command_gets_files_and_keeps_matching_files(host: Host) -> None:
    made = (
        "import pathlib as p\n"
        "p.Path('out/deep').mkdir(parents=True)\n"
        "p.Path('out/deep/a.bin').write_bytes(b'a')\n"
        "p.Path('b.log').write_text(p.Path('given.txt').read_text())\n"
        "p.Path('c.txt').write_text('c')\n"
    )
    result = host.python(made, files={"given.txt": b"given"}, keep=["out", "*.log", "no*"])
    assert host.kept(result) == {"files/out/deep/a.bin": b"a", "files/b.log": b"given", "output.log": b""}


def test_sent_program_can_be_executed(host: Host) -> None:
    files = {"go.sh": b"#!/bin/sh\necho sent $1\n", "data": b""}
    assert host.run("./go.sh", "x", files=files, executable=["go.sh"]).exit_code == 0 and host.lines == ["sent x"]
    with pytest.raises(UsageError, match="must be files of the job"):
        host.run("./go.sh", files=files, executable=["../go.sh"])


def test_files_outside_directory_are_not_kept(host: Host, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.log").write_text("secret")
    made = (
        f"import os; os.symlink({str(tmp_path / 'secret' / 'key.log')!r}, 'link.log')\n"
        f"os.symlink({str(tmp_path / 'secret')!r}, 'linked')\nos.mkfifo('pipe.log')\n"
    )
    assert list(host.python(made, keep=["*.log", "linked", "linked/*", "*/*.log"]).files) == ["output.log"]


def test_files_that_gateway_rejects_are_not_kept(host: Host) -> None:
    made = (
        "import os, pathlib as p\n"
        "open(b'x\\xff.log', 'w').close()\n"
        "deep = p.Path(*['d' * 200] * 5)\ndeep.mkdir(parents=True)\n(deep / 'x.log').touch()\n"
        "p.Path('a.log').touch()\n"
    )
    result = host.python(made, keep=["**/*.log"])
    assert sorted(result.files) == ["files/a.log", "output.log"]
    assert result.reason == "2 files have too long or invalid names and were not kept"
    assert decode_result(encode_result(result)).files == result.files


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a/../../b", "", "a\n", ".", "a**b"])
def test_patterns_outside_directory_are_refused(host: Host, pattern: str) -> None:
    with pytest.raises(UsageError, match="invalid pattern"):
        host.python("", keep=[pattern])


def test_output_is_shown_while_command_runs(host: Host, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def show(text: str) -> None:
        host.lines.append(text)
        go.touch()

    host.print = show
    result = host.python(
        f"import pathlib, time\nprint('ready', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nprint('end')"
    )
    assert result.exit_code == 0 and host.lines == ["ready", "end"]


def test_output_without_lines_and_with_any_bytes_is_shown(host: Host) -> None:
    result = host.python("import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 100_000)")
    assert "".join(host.lines) == "�" + "x" * 100_000
    assert len(host.kept(result)["output.log"]) == 100_001


def test_large_output_is_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.host.jobs.command_job._MAX_SHOWN", 1000)
    monkeypatch.setattr("hil.controller.farm.host.jobs.command_job._MAX_OUTPUT", 5000)
    result = host.python("print('\\n'.join(['x' * 99] * 1000))")
    assert "output limit exceeded" in host.lines[-1] and sum(map(len, host.lines)) < 70_000
    assert len(host.kept(result)["output.log"]) == 5000


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_background_processes_end_with_command(host: Host) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid)"
    began = time.monotonic()
    assert host.python(code).exit_code == 0 and time.monotonic() - began < 60
    eventually(lambda: not is_alive(int(host.lines[0])))


def test_output_of_background_processes_does_not_delay_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.host.jobs.command_job._MAX_PIPE", 100)
    read, write = os.pipe()
    with open(read, "rb") as stdout, open(write, "wb", buffering=0) as background:  # noqa: PTH123

        def poll() -> int:
            background.write(b"y" * 40)
            return 0

        ended: Any = SimpleNamespace(stdout=stdout, poll=poll)
        assert b"".join(command_job._iter_output(ended)) == b"y" * 120


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
def test_cancelled_command_ends_with_all_processes(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.host.jobs.command_job._END_SECONDS", 0.2)

    def cancel(text: str) -> None:
        host.lines.append(text)
        raise KeyboardInterrupt

    host.print = cancel
    with pytest.raises(KeyboardInterrupt):
        host.python(
            "import os, subprocess, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print(os.getpid(), subprocess.Popen(['sleep', '300']).pid, flush=True)\nos.wait()"
        )
    eventually(lambda: not any(is_alive(int(pid)) for pid in host.lines[0].split()))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["no-such-program"], "program 'no-such-program' not found"),
        (["./missing"], "cannot be started"),
        ([""], "program is empty"),
        ([], "1 to 1000 words"),
        (["a\0b"], "1 to 1000 words"),
    ],
)
def test_invalid_command_is_refused(host: Host, command: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        host.run(*command)


def test_host_without_permission_refuses_commands(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not allow commands"):
        Host(tmp_path, allow=False).run("true")
    assert not (tmp_path / "job").exists() and os.listdir(tmp_path) == []  # noqa: PTH208
