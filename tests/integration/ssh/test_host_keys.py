"""Host keys of a real sshd: unknown keys are rejected or pinned, changed keys are rejected."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from support.sshd import BOTH, LOOPBACK, Sshd, make_key, running_sshd

from hil.controller.devices.ssh.errors import HostKeyRefused
from hil.controller.devices.ssh.openssh.log import Log
from hil.errors import EXIT_BOARD, UsageError

pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)


def test_unknown_key_error_suggests_pinning_command(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known hosts"
    with pytest.raises(HostKeyRefused, match=r"unknown host key of .*: ssh-ed25519 SHA256:") as refused:
        log_in(known_hosts=str(known))
    assert refused.value.exit_code == EXIT_BOARD
    assert "--accept-new-host-key" in refused.value.hint
    pinning = refused.value.hint[refused.value.hint.index("ssh-keyscan") :].partition(", or")[0]
    subprocess.run(pinning, shell=True, check=True, capture_output=True)
    assert log_in(known_hosts=str(known)).run(["echo", "in"]).text == "in"


def test_client_sends_only_key_exchange_to_unknown_server(log_in, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "other") as server:
        (server.folder / "log").write_text("")
        with pytest.raises(HostKeyRefused):
            log_in(server=server, known_hosts=str(tmp_path / "none"))
        assert "key" not in server.log


def test_accept_new_host_key_pins_key(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "new" / "known_hosts"
    log_in(known_hosts=str(known), accept_new_host_key=True)
    name = f"[{LOOPBACK}]:{sshd.port}"
    assert subprocess.run(["ssh-keygen", "-F", name, "-f", known], stdout=subprocess.DEVNULL).returncode == 0
    log_in(known_hosts=str(known))


def test_pinning_preserves_existing_lines(log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("# mine\nother ssh-ed25519 not-even-a-key\n")
    log_in(known_hosts=str(known), accept_new_host_key=True)
    assert known.read_text().startswith("# mine\nother ssh-ed25519 not-even-a-key\n")
    log_in(known_hosts=str(known))


def test_unwritable_known_hosts_error_names_file(log_in) -> None:
    with pytest.raises(UsageError, match=r"cannot pin the host key .*/proc/known_hosts"):
        log_in(known_hosts="/proc/known_hosts", accept_new_host_key=True)


def test_slow_ssh_log_reader_finds_fingerprint(log_in, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Log.feed

    def read_slowly(self: Log, line: str, *, is_own: bool) -> None:
        time.sleep(0.05)
        feed(self, line, is_own=is_own)

    monkeypatch.setattr(Log, "feed", read_slowly)
    assert log_in().fingerprint.startswith("SHA256:")


def test_changed_key_fails_even_with_accept_new(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known, key=make_key(tmp_path / "old"))
    before = known.read_text()
    with pytest.raises(HostKeyRefused, match="has changed: it shows ssh-ed25519 SHA256") as refused:
        log_in(known_hosts=str(known), accept_new_host_key=True)
    assert known.read_text() == before
    forget = refused.value.hint[refused.value.hint.index("ssh-keygen") :]
    subprocess.run(shlex.split(forget), check=True, capture_output=True)
    log_in(known_hosts=str(known), accept_new_host_key=True)


def test_key_of_different_type_counts_as_changed(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known, key=make_key(tmp_path / "old", kind="ecdsa"))
    with pytest.raises(HostKeyRefused, match="has changed"):
        log_in(known_hosts=str(known), accept_new_host_key=True)


def test_hashed_known_hosts_names_match(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert LOOPBACK not in known.read_text()
    log_in(known_hosts=str(known))


def test_revoked_key_fails_login(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    sshd.pin(known)
    known.write_text(known.read_text() + "@revoked * " + sshd.host_key.with_suffix(".pub").read_text())
    with pytest.raises(HostKeyRefused, match="is revoked"):
        log_in(known_hosts=str(known), accept_new_host_key=True)


@pytest.mark.parametrize("checking", ["no", "ask"])
def test_ssh_config_cannot_allow_revoked_key(sshd: Sshd, log_in, home: Path, tmp_path: Path, checking: str) -> None:
    (home / ".ssh/config").write_text(f"Host *\n  StrictHostKeyChecking {checking}\n")
    known = tmp_path / "known_hosts"
    known.write_text("@revoked * " + sshd.host_key.with_suffix(".pub").read_text())
    with pytest.raises(HostKeyRefused, match="is revoked"):
        log_in(known_hosts=str(known))


def test_user_known_hosts_file_applies_by_default(sshd: Sshd, log_in, home: Path) -> None:
    sshd.pin(home / ".ssh/known_hosts")
    log_in(known_hosts="")


def test_ssh_config_cannot_allow_changed_key(sshd: Sshd, log_in, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text("Host *\n  StrictHostKeyChecking no\n")
    sshd.pin(tmp_path / "old", key=make_key(tmp_path / "key"))
    with pytest.raises(HostKeyRefused, match="has changed"):
        log_in(known_hosts=str(tmp_path / "old"))


def test_required_fingerprint_pins_only_this_key(sshd: Sshd, log_in, tmp_path: Path) -> None:
    known, wrong = tmp_path / "known_hosts", "SHA256:" + "A" * 43
    shown = log_in().fingerprint
    with pytest.raises(HostKeyRefused, match=f"the host key of .* is ssh-ed25519 {re.escape(shown)}, expected {wrong}"):
        log_in(known_hosts=str(known), host_key=wrong)
    assert not known.exists()
    assert log_in(known_hosts=str(known), host_key=shown).fingerprint == shown
    assert known.exists()
    with pytest.raises(HostKeyRefused, match="expected"):
        log_in(known_hosts=str(known), host_key=wrong)
