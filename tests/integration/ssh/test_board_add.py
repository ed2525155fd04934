"""`hil board add` with a real sshd, and boards that are hosts of the ssh config."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.sshd import LOOPBACK, Sshd
from support.terminals import terminal

from hil.controller.cli.main import call
from hil.controller.devices.choosing.board_resolver import choose
from hil.errors import EXIT_BOARD, EXIT_OK, UsageError

WRONG = "SHA256:" + "A" * 43


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    for name in ("HIL_BOARDS", "HIL_BOARD", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hil(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Return a function that runs hil in this process: exit code, stdout, stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hil", *map(str, words)])
        return (call(), *capfd.readouterr())

    return run


def config_of(home: Path, name: str = "kitchen") -> Path:
    return home / ".config" / "hil" / "boards" / f"{name}.toml"


def add_words(sshd: Sshd, known_hosts: Path) -> list[object]:
    return ["board", "add", "kitchen", sshd.address, "--identity", sshd.identity, "--known-hosts", known_hosts]


def fingerprint_of(sshd: Sshd) -> str:
    shown = subprocess.run(["ssh-keygen", "-lf", sshd.host_key], check=True, capture_output=True, text=True)
    return shown.stdout.split()[1]


def test_add_asks_for_host_key_and_checks_board(sshd: Sshd, home: Path, tmp_path: Path, hil) -> None:
    known_hosts = tmp_path / "known_hosts"
    words = ["-m", "hil", *add_words(sshd, known_hosts)]
    for answer, code in ((b"no", EXIT_BOARD), (b"yes", EXIT_OK)):
        assert not config_of(home).exists()
        with terminal(*words, cwd=tmp_path, env=os.environ) as asked:
            asked.wait_for(f"key fingerprint is {fingerprint_of(sshd)}".encode())
            asked.receive_answer(b"(yes/no", answer)
            assert asked.ended(120) == code, asked.shown
    assert b"a tiny model runs and returns correct outputs" in asked.shown
    subprocess.run(["ssh-keygen", "-F", f"[{LOOPBACK}]:{sshd.port}", "-f", known_hosts], check=True)
    assert config_of(home).stat().st_mode & 0o777 == 0o600
    connection = choose("kitchen").config.connection
    assert (connection.address, connection.identity) == (sshd.address, str(sshd.identity))
    assert not connection.accept_new_host_key
    assert hil("board", "rename", "kitchen", "garage")[0] == EXIT_OK
    assert hil("board", "shell", "garage", "--", "echo", "in") == (EXIT_OK, "in\n", "")
    code, out, _ = hil("board", "remove", "garage", "--yes", "--json")
    assert (code, json.loads(out)["path"]) == (EXIT_OK, str(config_of(home, "garage")))
    assert not config_of(home, "garage").exists()


def test_add_without_terminal_refuses_unknown_key(sshd: Sshd, home: Path, tmp_path: Path, hil) -> None:
    code, out, err = hil(*add_words(sshd, tmp_path / "known_hosts"))
    assert code == EXIT_BOARD
    assert "unknown host key" in out and fingerprint_of(sshd) in out
    assert "FAIL: host key: kitchen is not added" in err
    assert not config_of(home).exists() and not (tmp_path / "known_hosts").exists()


def test_add_refuses_other_fingerprint(sshd: Sshd, home: Path, tmp_path: Path, hil) -> None:
    code, out, _ = hil(*add_words(sshd, tmp_path / "known_hosts"), "--fingerprint", WRONG)
    assert code == EXIT_BOARD
    assert f"{fingerprint_of(sshd)}, expected {WRONG}" in out
    assert not config_of(home).exists() and not (tmp_path / "known_hosts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--yes", "--fingerprint"])
def test_add_pins_key_without_question(sshd: Sshd, home: Path, tmp_path: Path, hil, way: str) -> None:
    options = [way] if way == "--yes" else [way, fingerprint_of(sshd)]
    code, out, _ = hil(*add_words(sshd, tmp_path / "known_hosts"), *options, "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["path"]) == (EXIT_OK, True, str(config_of(home)))
    assert config_of(home).exists() and (tmp_path / "known_hosts").exists()


@pytest.fixture
def alias(sshd: Sshd, home: Path) -> str:
    lines = ["Host lab", f"HostName {LOOPBACK}", f"Port {sshd.port}", f"User {sshd.user}"]
    lines += [f"IdentityFile {sshd.identity}", f"UserKnownHostsFile {sshd.known_hosts}"]
    (home / ".ssh" / "config").write_text("\n".join(lines) + "\n")
    return "lab"


def test_host_of_ssh_config_is_board(alias: str, hil) -> None:
    code, out, err = hil("board", "shell", alias, "--", "echo", "in")
    assert (code, out) == (EXIT_OK, "in\n"), err
    assert err == "board lab is a host of ~/.ssh/config: using ssh:lab\n"
    assert choose(alias).name == "ssh:lab"


def test_host_of_ssh_config_is_address_of_new_board(alias: str, home: Path, hil) -> None:
    assert hil("board", "add", "lab", alias, "--no-check")[0] == EXIT_OK
    assert 'address = "ssh:lab"' in config_of(home, "lab").read_text()
    code, out, err = hil("board", "shell", "lab", "--", "echo", "in")
    assert (code, out, err) == (EXIT_OK, "in\n", "")


def test_board_type_with_name_of_ssh_host_is_ambiguous(alias: str, home: Path) -> None:
    config_of(home, "lab").parent.mkdir(parents=True)
    config_of(home, "lab").write_text('[board]\ndescription = "a type"\n')
    with pytest.raises(UsageError, match="ambiguous board 'lab'") as error:
        choose(alias)
    assert "--board ssh:lab --runtime-hw-type lab" in error.value.hint
    assert choose("ssh:lab", "lab").config.description == "a type"


def test_unknown_board_suggests_host_of_ssh_config(alias: str) -> None:
    with pytest.raises(UsageError) as error:
        choose("labb")
    assert "did you mean 'lab'" in error.value.hint
