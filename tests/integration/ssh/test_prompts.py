"""Login prompts: users see, answer or cancel them. Non-interactive users get a hint."""

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
from support.slow import slow_except
from support.sshd import IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Sshd, make_key, running_sshd
from support.terminals import CTRL_C, CTRL_D, Terminal, terminal

from hil.controller.devices.ssh.shell import Shell
from hil.errors import EXIT_BOARD, EXIT_INTERRUPTED

LogIn = Callable[..., Shell]
SESAME = b"sesame"
# Much less than the 15 s that a suite waits for its threads.
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
# The ssh-keygen options for each key format.
FORMS = {
    "ed25519": ["-t", "ed25519"],
    "ecdsa": ["-t", "ecdsa"],
    "rsa in PEM": ["-t", "rsa", "-b", "2048", "-m", "PEM"],
    "rsa in PKCS8": ["-t", "rsa", "-b", "2048", "-m", "PKCS8"],
}


def passphrase_of(key: Path) -> bytes:
    """Return ssh's prompt, which shows only the start of a long path."""
    return f"Enter passphrase for key '{str(key)[:100]}".encode()


def locked_key(path: Path, form: list[str] = FORMS["ed25519"]) -> Path:
    command = ["ssh-keygen", "-q", *form, "-N", SESAME.decode(), "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def log_in_by(sshd: Sshd, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Log in twice in a terminal, with a given identity or the default ones."""
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
def test_passphrase_prompt_unlocks_every_key_format(
    sshd: Sshd, log_in_by: Callable[..., Terminal], tmp_path: Path, form: list[str]
) -> None:
    key = locked_key(tmp_path / "locked", form)
    sshd.authorize(key)
    asked = log_in_by(key)
    asked.receive_answer(passphrase_of(key), SESAME)
    assert asked.ended() == 0
    assert asked.shown.count(f"who: {sshd.user}".encode()) == 2 and asked.shown.count(b"Enter passphrase") == 1
    assert SESAME not in asked.shown


def test_passphrase_prompt_unlocks_default_key(sshd: Sshd, log_in_by: Callable[..., Terminal], home: Path) -> None:
    sshd.authorize(locked_key(home / ".ssh/id_ed25519"))
    asked = log_in_by()
    asked.receive_answer(b"Enter passphrase", SESAME)
    asked.ended()
    assert asked.shown.count(b"who: ") == 2


def test_wrong_passphrase_prompts_three_times(sshd: Sshd, log_in_by: Callable[..., Terminal], tmp_path: Path) -> None:
    key = locked_key(tmp_path / "locked", FORMS["rsa in PEM"])
    sshd.authorize(key)
    asked = log_in_by(key)
    asked.receive_answer(b"Enter passphrase", b"wrong")
    asked.receive_answer(b"Enter passphrase", b"wrong, too")
    asked.receive_answer(b"Enter passphrase", b"no")
    asked.receive_answer(b"password: ", CTRL_D)
    asked.wait_for(b"refused the login")
    asked.receive_answer(b"Enter passphrase", SESAME)
    asked.ended()
    assert asked.shown.count(b"who: ") == 1 and b"Traceback" not in asked.shown


@pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")
def test_wrong_password_prompts_repeatedly_until_ctrl_c(sshd: Sshd, log_in_by: Callable[..., Terminal]) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    asked = log_in_by(address=address)
    asked.receive_answer(b"password: ", b"wrong")
    asked.receive_answer(b"password: ", PASSWORD.encode())
    assert asked.ended() == 0 and asked.shown.count(b"who: ") == 2
    asked = log_in_by(address=address)
    asked.wait_for(b"password: ")
    asked.type(CTRL_C)
    assert asked.ended() != 0 and b"KeyboardInterrupt" in asked.shown and b"who: " not in asked.shown


def test_client_skips_password_prompt_without_server_support(
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


def test_client_sends_key_and_verification_code(
    two_factors: tuple[str, Path], log_in_by: Callable[..., Terminal], sshd: Sshd, tmp_path: Path
) -> None:
    address, known_hosts = two_factors
    (tmp_path / "program.py").write_text(ASKED)
    with terminal(tmp_path / "program.py", address, sshd.identity, known_hosts, cwd=tmp_path, env=os.environ) as asked:
        asked.receive_answer(b"Verification code: ", b"123456")
        asked.wait_for(b"who: ")
        for _ in range(3):  # as often as ssh prompts
            asked.receive_answer(b"Verification code: ", b"000000")
        asked.wait_for(b"refused: ")
        asked.ended()


class _TwoFactors(paramiko.ServerInterface):
    """Require a key, then a code. Run commands with the start of their stdin."""

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
            script = channel.recv(1 << 16)  # hil sends short input in one message
            done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, input=script)
            channel.sendall(done.stdout)
            channel.send_exit_status(done.returncode)
            channel.close()

        threading.Thread(target=run, daemon=True).start()
        return True


@pytest.fixture
def two_factors(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a two-factor server, and its known_hosts file."""
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
    """Commands that open a board, without the board options."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["run", "suite", "bench", "bisect", "board"], 0, 1))
def test_prompt_stays_visible_and_ctrl_c_exits_immediately(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None, name: str
) -> None:
    key = locked_key(tmp_path / "locked")
    sshd.authorize(key)
    with terminal(*workloads[name], *options(sshd, key), cwd=tmp_path, env=os.environ) as asked:
        asked.wait_for(b"Enter passphrase")
        asked.rest(1)
        assert passphrase_of(key) in asked.shown and asked.shown.endswith(b"': ")
        assert asked.rest(2) == b""
        asked.type(CTRL_C)
        began = time.monotonic()
        assert asked.ended() == EXIT_INTERRUPTED
        assert time.monotonic() - began < AT_ONCE_S
    assert b"Traceback" not in asked.shown


def test_external_signal_ends_prompt_of_suite(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None
) -> None:
    import signal

    key = locked_key(tmp_path / "locked")
    sshd.authorize(key)
    with terminal(*workloads["suite"], *options(sshd, key), cwd=tmp_path, env=os.environ) as asked:
        asked.wait_for(passphrase_of(key))
        os.kill(asked._child, signal.SIGINT)
        began = time.monotonic()
        assert asked.ended() == EXIT_INTERRUPTED
        assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("name", ["run", "suite", "bench", "bisect", "board"])
def test_non_interactive_login_fails_with_hint(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None, name: str
) -> None:
    key = locked_key(tmp_path / "locked")
    sshd.authorize(key)
    before = set(tmp_path.iterdir()) | {tmp_path / "cache"}
    command = [sys.executable, *map(str, [*workloads[name], *options(sshd, key)])]
    wide = {**os.environ, "COLUMNS": "1000"}
    ended = subprocess.run(command, cwd=tmp_path, env=wide, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode == EXIT_BOARD, said
    assert "refused the login" in said and f"ssh-add {key}" in said and "--identity" in said
    assert "Traceback" not in said
    assert set(tmp_path.iterdir()) <= before


@pytest.mark.slow
def test_pytest_plugin_shows_prompt_despite_capture(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nhil_models = models\n")
    key = locked_key(tmp_path / "locked")
    sshd.authorize(key)
    where = [str(one).replace("--", "--hil-", 1) if str(one).startswith("--") else one for one in options(sshd, key)]
    with terminal("-m", "pytest", "-q", *where, cwd=tmp_path, env=os.environ) as asked:
        asked.wait_for(passphrase_of(key))
        assert asked.rest(2) == b""
        asked.type(CTRL_C)
        assert asked.ended() == pytest.ExitCode.INTERRUPTED


@pytest.mark.slow
def test_pytest_plugin_reports_non_interactive_login(
    sshd: Sshd, workloads: dict[str, list[object]], tmp_path: Path, fresh_cache: None
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nhil_models = models\n")
    where = map(str, options(sshd, locked_key(tmp_path / "locked")))
    command = [sys.executable, "-m", "pytest", "-q", *(one.replace("--", "--hil-", 1) for one in where)]
    ended = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "BOARD_REFUSED" in ended.stdout and "ssh-add" in ended.stdout and "password: " not in ended.stdout
