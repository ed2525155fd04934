"""Whoever is asked for something sees it, answers it or calls it off; and who cannot be asked is told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from onnx import TensorProto, helper
from support.models import save_model
from support.sshd import IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Sshd, make_key, running_sshd
from support.terminals import CTRL_C, CTRL_D, Terminal, terminal

from hil.controller.devices.ssh.shell import Shell
from hil.errors import EXIT_BOARD, EXIT_INTERRUPTED

LogIn = Callable[..., Shell]
SESAME = b"sesame"
# Far less than the 15 s for which a suite waits for its threads.
AT_ONCE_S = 10
ASKED = """
import sys
from pathlib import Path
from hil.core.board_config import Connection
from hil.controller.devices.ssh.connect import open_shell
from hil.errors import BoardRefused
connection = Connection(identity=sys.argv[2], known_hosts=sys.argv[3])
for attempt in range(2):
    try:
        with open_shell(sys.argv[1], connection, board="b", base=Path("/")) as shell:
            print("who:", shell.run(["whoami"]).text)
    except BoardRefused as error:
        print("refused:", error)
"""
# How ssh-keygen writes each form of a key.
FORMS = {
    "ed25519": ["-t", "ed25519"],
    "ecdsa": ["-t", "ecdsa"],
    "rsa in PEM": ["-t", "rsa", "-b", "2048", "-m", "PEM"],
    "rsa in PKCS8": ["-t", "rsa", "-b", "2048", "-m", "PKCS8"],
}


def locked_key(path: Path, form: list[str] = FORMS["ed25519"]) -> Path:
    command = ["ssh-keygen", "-q", *form, "-N", SESAME.decode(), "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def log_in_by(sshd: Sshd, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Logs in twice in a terminal, with an identity or those that are found."""
    contexts = []

    def call(identity: object = "", address: str = "") -> Terminal:
        (tmp_path / "program.py").write_text(ASKED)
        arguments = [tmp_path / "program.py", address or sshd.address, identity, sshd.known_hosts]
        contexts.append(terminal(*arguments, cwd=tmp_path, env=os.environ))
        return contexts[-1].__enter__()

    yield call
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_passphrase_opens_a_key_of_any_form_and_is_asked_for_once(
    sshd: Sshd, log_in_by: Callable[..., Terminal], tmp_path: Path, form: list[str]
) -> None:
    key = locked_key(tmp_path / "locked", form)
    sshd.authorize(key)
    asked = log_in_by(key)
    asked.answer(f"passphrase of {key}: ".encode(), SESAME)
    assert asked.ended() == 0
    assert asked.shown.count(f"who: {sshd.user}".encode()) == 2 and asked.shown.count(b"passphrase of") == 1
    assert SESAME not in asked.shown


def test_a_passphrase_opens_a_key_that_is_found(sshd: Sshd, log_in_by: Callable[..., Terminal], home: Path) -> None:
    sshd.authorize(locked_key(home / ".ssh/id_ed25519"))
    asked = log_in_by()
    asked.answer(b"id_ed25519: ", SESAME)
    asked.ended()
    assert asked.shown.count(b"who: ") == 2


def test_a_wrong_passphrase_is_told_and_asked_for_anew_three_times(
    sshd: Sshd, log_in_by: Callable[..., Terminal], tmp_path: Path
) -> None:
    key = locked_key(tmp_path / "locked", FORMS["rsa in PEM"])
    sshd.authorize(key)
    asked = log_in_by(key)
    asked.answer(b"passphrase of", b"wrong")
    asked.answer(b"wrong passphrase; that of", b"wrong, too")
    asked.answer(b"wrong passphrase; that of", b"no")
    asked.answer(b"password: ", CTRL_D)
    asked.wait_for(b"did not let us in")
    asked.answer(b"passphrase of", SESAME)
    asked.ended()
    assert asked.shown.count(b"who: ") == 1 and b"Traceback" not in asked.shown


@pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")
def test_a_wrong_password_is_asked_for_anew_and_ctrl_c_ends_it(sshd: Sshd, log_in_by: Callable[..., Terminal]) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    asked = log_in_by(address=address)
    asked.answer(b"password: ", b"wrong")
    asked.answer(b"password: ", PASSWORD.encode())
    assert asked.ended() == 0 and asked.shown.count(b"who: ") == 2
    asked = log_in_by(address=address)
    asked.wait_for(b"password: ")
    asked.type(CTRL_C)
    assert asked.ended() != 0 and b"KeyboardInterrupt" in asked.shown and b"who: " not in asked.shown


def test_no_password_is_asked_for_where_the_server_takes_none(
    log_in_by: Callable[..., Terminal], tmp_path: Path
) -> None:
    with running_sshd(tmp_path / "keys", "PasswordAuthentication no", "KbdInteractiveAuthentication no") as server:
        server.pin(server.known_hosts)
        stranger = make_key(tmp_path / "stranger")
        (tmp_path / "program.py").write_text(ASKED)
        arguments = (tmp_path / "program.py", server.address, stranger, server.known_hosts)
        with terminal(*arguments, cwd=tmp_path, env=os.environ) as asked:
            assert asked.ended() == 0
    assert asked.shown.count(b"refused: ") == 2 and b"password: " not in asked.shown


def test_a_key_and_a_code_where_the_server_wants_both(
    two_factors: tuple[str, Path], log_in_by: Callable[..., Terminal], sshd: Sshd, tmp_path: Path
) -> None:
    address, known_hosts = two_factors
    (tmp_path / "program.py").write_text(ASKED)
    with terminal(tmp_path / "program.py", address, sshd.identity, known_hosts, cwd=tmp_path, env=os.environ) as asked:
        asked.answer(b"Verification code: ", b"123456")
        asked.wait_for(b"who: ")
        asked.answer(b"Verification code: ", b"000000")
        asked.wait_for(b"refused: ")
        asked.wait_for(b"one way to log in is not enough")
        asked.ended()
    assert b"123456" in asked.shown, "the server lets it be shown"


class _TwoFactors(paramiko.ServerInterface):
    """Wants a key, then a code; runs every command as a shell would run `echo`."""

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.get_allowed_auths = lambda username: "keyboard-interactive"  # type: ignore[method-assign]
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL  # type: ignore[attr-defined,no-any-return]

    def check_auth_interactive(self, username: str, submethods: str) -> paramiko.server.InteractiveQuery:
        return paramiko.server.InteractiveQuery("", "", ("Verification code: ", True))

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        right = responses == ["123456"]
        return paramiko.AUTH_SUCCESSFUL if right else paramiko.AUTH_FAILED  # type: ignore[attr-defined,no-any-return]

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED  # type: ignore[attr-defined,no-any-return]

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        def run() -> None:
            done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            channel.sendall(done.stdout)
            channel.send_exit_status(done.returncode)
            channel.close()

        threading.Thread(target=run, daemon=True).start()
        return True


@pytest.fixture
def two_factors(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server that wants two factors, and the file that its key is pinned in."""
    import socket

    key = paramiko.ECDSAKey.generate()
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        known_hosts = tmp_path / "two_factors"
        known_hosts.write_text(f"[{LOOPBACK}]:{port} {key.get_name()} {key.get_base64()}\n")
        transports = []

        def serve() -> None:
            while True:
                try:
                    transport = paramiko.Transport(listener.accept()[0])
                except OSError:
                    return
                transports.append(transport)
                transport.add_server_key(key)
                transport.start_server(server=_TwoFactors())

        threading.Thread(target=serve, daemon=True).start()
        yield f"root@{LOOPBACK}:{port}", known_hosts
        listener.shutdown(socket.SHUT_RDWR)
        for transport in transports:
            transport.close()


# ---- the workloads


@pytest.fixture
def workloads(tmp_path: Path) -> dict[str, list[object]]:
    """Commands that open a board: what follows are the options that name it."""
    models = tmp_path / "models"
    models.mkdir()
    node = helper.make_node("Add", ["x", "x"], ["y"], "twice")
    value = (TensorProto.FLOAT, [4])
    model = save_model(models / "twice.onnx", [node], [("x", *value)], [("y", *value)])
    hil = ["-m", "hil.controller.cli.main"]
    return {
        "run": [*hil, "run", model],
        "suite": [*hil, "suite", "run", models],
        "bench": [*hil, "bench", model],
        "bisect": [*hil, "bisect", model],
        "board": [*hil, "board", "info"],
    }


def options(sshd: Sshd, key: Path) -> list[object]:
    return ["--board", sshd.address, "--identity", key, "--known-hosts", sshd.known_hosts]


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["run", "suite", "bench", "bisect", "board"])
def test_nothing_is_shown_over_a_prompt_and_ctrl_c_ends_at_once(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None, name: str
) -> None:
    key = locked_key(tmp_path / "locked")
    with terminal(*workloads[name], *options(sshd, key), cwd=tmp_path, env=os.environ) as asked:
        asked.wait_for(b"passphrase of ")
        asked.rest(1)
        assert asked.shown.endswith(f"passphrase of {key}: ".encode())
        assert asked.rest(2) == b""
        asked.type(CTRL_C)
        began = time.monotonic()
        assert asked.ended() == EXIT_INTERRUPTED
        assert time.monotonic() - began < AT_ONCE_S
    assert b"Traceback" not in asked.shown


def test_a_signal_from_elsewhere_ends_the_prompt_of_a_suite(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None
) -> None:
    import signal

    key = locked_key(tmp_path / "locked")
    with terminal(*workloads["suite"], *options(sshd, key), cwd=tmp_path, env=os.environ) as asked:
        asked.wait_for(f"passphrase of {key}: ".encode())
        os.kill(asked._child, signal.SIGINT)
        began = time.monotonic()
        assert asked.ended() == EXIT_INTERRUPTED
        assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("name", ["run", "suite", "bench", "bisect", "board"])
def test_who_cannot_be_asked_is_told_what_to_do_and_nothing_is_left_behind(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None, name: str
) -> None:
    key = locked_key(tmp_path / "locked")
    before = set(tmp_path.iterdir()) | {tmp_path / "cache"}
    command = [sys.executable, *map(str, [*workloads[name], *options(sshd, key)])]
    wide = {**os.environ, "COLUMNS": "1000"}
    ended = subprocess.run(command, cwd=tmp_path, env=wide, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode == EXIT_BOARD, said
    assert "did not let us in" in said and f"ssh-add {key}" in said and "--identity" in said
    assert "Traceback" not in said
    assert set(tmp_path.iterdir()) <= before


def test_pytest_lets_the_prompt_through_what_it_captures(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nhil_models = models\n")
    key = locked_key(tmp_path / "locked")
    where = [str(one).replace("--", "--hil-", 1) if str(one).startswith("--") else one for one in options(sshd, key)]
    with terminal("-m", "pytest", "-q", *where, cwd=tmp_path, env=os.environ) as asked:
        asked.wait_for(f"passphrase of {key}: ".encode())
        assert asked.rest(2) == b""
        asked.type(CTRL_C)
        assert asked.ended() == pytest.ExitCode.INTERRUPTED


def test_pytest_tells_who_cannot_be_asked(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nhil_models = models\n")
    where = map(str, options(sshd, locked_key(tmp_path / "locked")))
    command = [sys.executable, "-m", "pytest", "-q", *(one.replace("--", "--hil-", 1) for one in where)]
    ended = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "BOARD_REFUSED" in ended.stdout and "ssh-add" in ended.stdout and "password: " not in ended.stdout
