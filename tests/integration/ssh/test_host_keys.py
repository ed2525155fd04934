"""Host keys on a real sshd: unknown ones are refused or pinned, changed ones are refused."""

from __future__ import annotations

import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from support.sshd import LOOPBACK, Sshd, make_key, running_sshd

from hil.controller.devices.ssh.known_hosts import HostKeyRefused
from hil.errors import EXIT_BOARD, UsageError


def test_an_unknown_key_is_refused_with_what_pins_it(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known hosts"
    with pytest.raises(HostKeyRefused, match="is not known: ssh-ed25519 SHA256:") as refused:
        log_in(known_hosts=str(known))
    assert refused.value.exit_code == EXIT_BOARD
    assert "--accept-new-host-key" in refused.value.hint
    pinning = refused.value.hint[refused.value.hint.index("ssh-keyscan") :].partition(", or")[0]
    subprocess.run(pinning, shell=True, check=True, capture_output=True)
    assert log_in(known_hosts=str(known)).run(["echo", "in"]).text == "in"


def test_nothing_is_sent_to_a_server_that_is_not_known(log_in, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "other") as server:
        (server.folder / "log").write_text("")
        with pytest.raises(HostKeyRefused):
            log_in(server=server, known_hosts=str(tmp_path / "none"))
        assert "key" not in server.log


def test_a_new_key_is_pinned_when_that_is_asked_for(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "new" / "known_hosts"
    log_in(known_hosts=str(known), accept_new_host_key=True)
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    assert known.read_text().startswith(f"[{LOOPBACK}]:{sshd.port} ssh-ed25519 ")
    log_in(known_hosts=str(known))


def test_pinning_keeps_what_was_there(log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("# mine\nother ssh-ed25519 not-even-a-key")
    log_in(known_hosts=str(known), accept_new_host_key=True)
    assert known.read_text().startswith("# mine\nother ssh-ed25519 not-even-a-key\n[")
    log_in(known_hosts=str(known))


def test_a_file_that_cannot_be_written_is_named(log_in) -> None:
    with pytest.raises(UsageError, match=r"cannot pin the host key .* in /proc/known_hosts"):
        log_in(known_hosts="/proc/known_hosts", accept_new_host_key=True)


def test_a_changed_key_is_always_refused(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known, key=make_key(tmp_path / "old"))
    before = known.read_text()
    with pytest.raises(HostKeyRefused, match="has changed: it shows ssh-ed25519 SHA256") as refused:
        log_in(known_hosts=str(known), accept_new_host_key=True)
    assert known.read_text() == before
    forget = refused.value.hint[refused.value.hint.index("ssh-keygen") :]
    subprocess.run(shlex.split(forget), check=True, capture_output=True)
    log_in(known_hosts=str(known), accept_new_host_key=True)


def test_a_key_of_another_kind_is_a_changed_one(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known, key=make_key(tmp_path / "old", kind="ecdsa"))
    with pytest.raises(HostKeyRefused, match="has changed"):
        log_in(known_hosts=str(known), accept_new_host_key=True)


def test_hashed_names_are_read(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert LOOPBACK not in known.read_text()
    log_in(known_hosts=str(known))


def test_a_revoked_key_is_refused(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known)
    known.write_text(known.read_text() + "@revoked * " + sshd.host_key.with_suffix(".pub").read_text())
    with pytest.raises(HostKeyRefused, match="is revoked"):
        log_in(known_hosts=str(known), accept_new_host_key=True)


def test_the_users_own_file_is_the_default(sshd: Sshd, log_in, home: Path) -> None:
    sshd.pin(home / ".ssh/known_hosts")
    log_in(known_hosts="")


def test_the_ssh_config_makes_nothing_looser(log_in, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text("Host *\n  StrictHostKeyChecking no\n")
    with pytest.raises(HostKeyRefused):
        log_in(known_hosts=str(tmp_path / "none"))


def test_fabric_alone_would_let_anybody_answer(sshd: Sshd, home: Path) -> None:
    """What is mended: once this fails, the mending may go."""
    import fabric

    keys = {"key_filename": str(sshd.identity), "allow_agent": False}
    with fabric.Connection(LOOPBACK, sshd.user, sshd.port, connect_kwargs=keys) as connection:
        connection.open()
        assert connection.is_connected
