"""Broken links: temporary and permanent cuts, and a stopped server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sshd import BOTH, LOOPBACK, Relay, Sshd, running_sshd
from support.waiting import eventually

from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.errors import BoardLost, HilError

LogIn = Callable[..., Shell]
pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)
# Much longer than the 12 s of silence after which hil gives up a link.
SOON_S = 60


@pytest.fixture
def relay(sshd: Sshd) -> Iterator[Relay]:
    made = Relay(sshd.port)
    yield made
    made.close()


@pytest.fixture(params=["direct", "through a jump"])
def far_shell(
    request: pytest.FixtureRequest, sshd: Sshd, relay: Relay, log_in: LogIn, home: Path, tmp_path: Path
) -> Shell:
    """A shell over a link that can be cut: the link to the board, or to the jump host."""
    known = tmp_path / "known_hosts"
    sshd.pin(known, relay.port)
    if request.param == "direct":
        return log_in(f"{sshd.user}@{LOOPBACK}:{relay.port}", known_hosts=str(known))
    gate = f"Host gate\n HostName {LOOPBACK}\n Port {relay.port}\n IdentityFile {sshd.identity}\n"
    (home / ".ssh/config").write_text(f"{gate}Host pi\n HostName {LOOPBACK}\n ProxyJump gate\n")
    sshd.pin(known)
    return log_in(f"{sshd.user}@pi:{sshd.port}", known_hosts=str(known))


def in_background(*calls: Callable[[], object]) -> tuple[list[threading.Thread], list[object]]:
    """Run each call in a thread. The list receives the results and errors."""
    ended: list[object] = []

    def work(call: Callable[[], object]) -> None:
        try:
            ended.append(call())
        except HilError as error:
            ended.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    return threads, ended


@pytest.mark.slow
def test_permanently_cut_link_fails_every_pending_call(far_shell: Shell, relay: Relay, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 20) * 100)
    tunnel = open_tunnel(far_shell, str(tmp_path / "far.sock"))
    relay.cut_after(1 << 20)
    threads, ended = in_background(
        lambda: far_shell.run(["sleep", "1000"], timeout=1000),
        lambda: far_shell.run(["cat"], stdin=tmp_path / "data", timeout=1000),
        lambda: far_shell.put(tmp_path / "data", f"{tmp_path}/there"),
        lambda: far_shell.get("/dev/zero", tmp_path / "back", 1 << 40),
    )
    for thread in threads:
        thread.join(SOON_S)
    assert [type(one) for one in ended] == [BoardLost] * 4
    eventually(lambda: not tunnel.alive(), within_s=SOON_S)
    with pytest.raises(BoardLost, match="broke"):
        far_shell.run(["true"])
    assert not far_shell.is_alive()
    started = time.monotonic()
    tunnel.close()
    far_shell.close()
    assert time.monotonic() - started < 10
    assert not (tmp_path / "there").exists() and not list(tmp_path.glob("back*"))


@pytest.mark.slow
def test_link_survives_five_second_cut(far_shell: Shell, relay: Relay, tmp_path: Path) -> None:
    tunnel = open_tunnel(far_shell, str(tmp_path / "far.sock"))
    threads, ended = in_background(lambda: far_shell.run(["sh", "-c", "sleep 1; echo done"], timeout=60))
    relay.cut()
    time.sleep(5)
    relay.restore()
    threads[0].join(SOON_S)
    assert getattr(ended[0], "text", ended[0]) == "done"
    assert tunnel.alive()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "far.sock"))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as near:
            near.connect(tunnel.address.removeprefix("unix:"))
            listener.accept()[0].close()
    tunnel.close()


def test_killed_server_fails_command_immediately(log_in: LogIn, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "other") as server:
        shell = log_in(server=server)
        threads, ended = in_background(lambda: shell.run(["sleep", "1000"], timeout=1000))
        eventually(lambda: "Starting session: command" in server.log)
        server.stop()
        threads[0].join(SOON_S)
    assert isinstance(ended[0], BoardLost)
    assert "`sleep 1000`" in str(ended[0])
