"""Two accounts on one board: the second waits for the first and sees who uses the board."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Ended
from support.models import DIGITS
from support.sshd import IS_ROOT, LOOPBACK, PASSWORD_USER, running_sshd

pytestmark = pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's lets in one account")

MODEL = DIGITS / "digits_cnn.onnx"
PASSWORD_UID = 12345
CONFIG = """
[board]
hw_type = "generic"
description = "the board, as {user} logs in"
runtime = "onnxruntime"
[connection]
address = "{user}@{host}:{port}"
identity = "{identity}"
known_hosts = "{known_hosts}"
folder = "{folder}"
"""
# Use the board until stdin ends.
HOLD = "import sys, hil\nwith hil.connect(sys.argv[1]):\n    print('held', flush=True)\n    sys.stdin.read()"


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Board configs `root` and `somebody`: one board, two accounts, one directory for each."""
    there = Path(tempfile.mkdtemp(prefix="hil-two-logins-"))
    there.chmod(0o755)
    keys = there / "authorized_keys"
    configs = tmp_path_factory.mktemp("boards")
    with running_sshd(tmp_path_factory.mktemp("sshd"), f"AuthorizedKeysFile {keys}") as server:
        keys.write_bytes(server.authorized.read_bytes())
        for user, uid in (("root", 0), (PASSWORD_USER, PASSWORD_UID)):
            folder = there / user
            folder.mkdir(mode=0o700)
            os.chown(folder, uid, uid)
            values = {"identity": server.identity, "known_hosts": server.known_hosts, "folder": folder}
            text = CONFIG.format(user=user, host=LOOPBACK, port=server.port, **values)
            (configs / f"{user}.toml").write_text(text)
        yield configs
    shutil.rmtree(there)


@pytest.fixture
def held(boards: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Give the board to account `root` until the process's stdin ends."""
    command = [sys.executable, "-c", HOLD, str(boards / "root.toml")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=environment)
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"held\n"
    yield process
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.mark.slow
def test_second_login_waits_and_shows_current_user(
    held: subprocess.Popen[bytes], boards: Path, hil: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    somebody = boards / f"{PASSWORD_USER}.toml"
    busy = hil("run", MODEL, "--board", somebody, "--wait", 0)
    assert busy.code == 4 and "logged in as root, is using the board (hil.connect)" in busy.out, busy.out
    info = hil("board", "info", somebody)
    assert "logged in as root, (hil.connect) for" in info.out, info.out
    command = [sys.executable, "-m", "hil.controller.cli.main", "run", str(MODEL), "--board", str(somebody)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as waiting:
        assert waiting.stderr and held.stdin
        shown = next(line for line in waiting.stderr if "has used the board" in line)
        assert "logged in as root, has used the board for" in shown
        held.stdin.close()
        out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, out + err
