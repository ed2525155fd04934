"""Runs on boards with an unusual sshd, shell or disk: hil installs the agent and the run passes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.models import DIGITS
from support.ssh_cases.dropbear import running_dropbear
from support.ssh_cases.user import Ended, User, host
from support.sshd import Sshd, running_sshd

pytestmark = pytest.mark.timeout(300)

MODEL = DIGITS / "digits_cnn.onnx"
# Mounts for the temporary directories of unusual boards.
PLACES = {
    "/tmp noexec": "mount -t tmpfs -o noexec tmpfs /tmp",
    "/tmp read-only": "mount -t tmpfs -o ro tmpfs /tmp",
    "/tmp full": "mount -t tmpfs -o size=64k tmpfs /tmp; dd if=/dev/zero of=/tmp/full bs=4k 2>/dev/null || :",
    "/dev/shm read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
}


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory outside /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="hil-sshd-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def run_model(user: User, server: Sshd, shared_cache: Path) -> Ended:
    """Run a model on the server's board."""
    user.take_key(server.identity)
    user.known_hosts.write_bytes(server.known_hosts.read_bytes())
    user.configure(host("board", server))
    user.env["HIL_CACHE_DIR"] = str(shared_cache)
    command = ("hil", "run", str(MODEL), "--board", "ssh:board", "--runtime", "onnxruntime")
    return user.run(*command, timeout=240)


@pytest.mark.slow
def test_run_passes_with_single_session_limit(user: User, start_sshd: Callable[..., Sshd], shared_cache: Path) -> None:
    ended = run_model(user, start_sshd("MaxSessions 1"), shared_cache)
    assert ended.code == 0, str(ended)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_run_passes_without_temporary_directory(user: User, elsewhere: Path, shared_cache: Path, place: str) -> None:
    with running_sshd(elsewhere / "sshd", mounts=PLACES[place]) as server:
        ended = run_model(user, server, shared_cache)
        assert ended.code == 0, str(ended)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [13, 30])
def test_run_passes_with_slow_login(
    user: User, start_sshd: Callable[..., Sshd], tmp_path: Path, shared_cache: Path, seconds: int
) -> None:
    find_keys = f'/bin/sh -c "sleep {seconds}; cat {tmp_path}/server/authorized_keys"'
    settings = ("AuthorizedKeysFile none", "AuthorizedKeysCommandUser root", f"AuthorizedKeysCommand {find_keys}")
    ended = run_model(user, start_sshd(*settings), shared_cache)
    assert ended.code == 0, str(ended)


@pytest.mark.slow
def test_run_passes_with_slow_bashrc(user: User, start_sshd: Callable[..., Sshd], shared_cache: Path) -> None:
    server = start_sshd(shell="/bin/bash")
    (server.home / ".bashrc").write_text("sleep 12\n")
    ended = run_model(user, server, shared_cache)
    assert ended.code == 0, str(ended)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "-j -k", "-K 1 -I 8", "-W 2048"])
def test_run_passes_on_dropbear(user: User, tmp_path: Path, shared_cache: Path, options: str) -> None:
    with running_dropbear(tmp_path / "dropbear", *options.split()) as server:
        ended = run_model(user, server, shared_cache)
        assert ended.code == 0, str(ended)
