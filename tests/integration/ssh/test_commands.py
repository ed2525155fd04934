"""Commands over SSH: input, output and exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sshd import BOTH, IS_ROOT, Sshd, running_sshd

from hil.controller.devices.ssh.shell import Shell, execute
from hil.errors import BoardError, BoardLost

pytestmark = [pytest.mark.daily, pytest.mark.parametrize(*BOTH, indirect=True)]


def test_command_passes_arguments_unchanged(shell: Shell) -> None:
    words = ["a b", "$HOME", "`id`", "*", "'\"", "", "-n", "; true", "ü\n\t\\", "~"]
    done = shell.run(["sh", "-c", 'for one; do printf "%s|" "$one"; done', "sh", *words])
    assert done.out.decode() == "".join(f"{word}|" for word in words)


def test_command_reads_input_from_bytes_file_or_empty(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"from a file")
    assert shell.run(["cat"], stdin=b"bytes").out == b"bytes"
    assert shell.run(["cat"], stdin=tmp_path / "in").text == "from a file"
    assert shell.run(["cat"]).out == b""


class Held(io.BytesIO):
    """Input that can be read only after a signal."""

    allowed = threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self.allowed.wait(60)
        return super().read(size)


def test_command_may_end_before_reading_input(shell: Shell) -> None:
    source = Held(b"unread")
    assert execute(shell.transport, "true", source, io.BytesIO().write, timeout=60)[0] == 0
    source.close()
    source.allowed.set()
    # An exception in a thread fails the test.
    for feeder in (thread for thread in threading.enumerate() if thread.name == "hil-ssh-input"):
        feeder.join(60)


def test_command_streams_input_and_output_concurrently(shell: Shell) -> None:
    data = os.urandom(8 << 20)
    assert shell.run(["sh", "-c", "tee /dev/stderr"], stdin=data, timeout=120).out == data


def test_failed_command_reports_stderr(shell: Shell) -> None:
    with pytest.raises(BoardError, match="failed with code 3") as failed:
        shell.run(["sh", "-c", "echo out of cheese >&2; exit 3"])
    assert failed.value.detail == "out of cheese"
    assert failed.value.board == "b"
    assert shell.run(["sh", "-c", "exit 3"], check=False).code == 3


def test_signal_gives_exit_code_128_plus_number(shell: Shell) -> None:
    assert shell.run(["sh", "-c", "kill -ILL $$"], check=False).code == 132


def test_endless_output_stops_command(shell: Shell) -> None:
    with pytest.raises(BoardError, match="`yes` wrote more than 16 MiB"):
        shell.run(["yes"], timeout=120)
    assert shell.run(["echo", "still here"]).text == "still here"


def test_stderr_preserves_only_last_64_kib(shell: Shell) -> None:
    done = shell.run(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo end >&2"], timeout=120)
    assert done.err.endswith("x\nend\n") or done.err.endswith("xend\n")
    assert len(done.err) == 64 << 10


def test_command_timeout_names_command(shell: Shell) -> None:
    with pytest.raises(BoardLost, match=r"`sleep 1000` did not respond within 0.5 s"):
        shell.run(["sleep", "1000"], timeout=0.5)
    assert shell.run(["echo", "still here"]).text == "still here"


def test_missing_program_exits_with_127(shell: Shell) -> None:
    assert shell.run(["no-such-program"], check=False).code == 127


def test_client_prefers_fast_ciphers(log_in: Callable[..., Shell], tmp_path: Path) -> None:
    with running_sshd(tmp_path / "debug", "LogLevel DEBUG1") as server:
        log_in(server=server)
        assert "cipher: aes128-gcm@openssh.com" in server.log


def test_shell_reports_user_address_and_fingerprint(shell: Shell, sshd: Sshd) -> None:
    shown = subprocess.run(["ssh-keygen", "-lf", sshd.host_key], capture_output=True, text=True, check=True).stdout
    assert (shell.address, shell.user) == (sshd.address, sshd.user)
    assert shell.fingerprint in shown.split()


TERMINAL = """
import sys
from pathlib import Path
from hil.core.board_config import Connection
from hil.controller.devices.ssh.connect import open_shell
address, identity, known_hosts, *argv = sys.argv[1:]
with open_shell(address, Connection(identity=identity, known_hosts=known_hosts), board="b", base=Path("/")) as shell:
    sys.exit(shell.interactive(argv))
"""


@pytest.mark.parametrize("argv", [[], ["sh", "-c", "PS1='$ ' exec sh -i"]], ids=["login shell", "command"])
def test_interactive_command_gets_terminal(
    sshd: Sshd, in_terminal: Callable[..., tuple[bytes, int]], argv: list[str]
) -> None:
    arguments = [sshd.address, str(sshd.identity), str(sshd.known_hosts), *argv]
    prompt = b"# " if IS_ROOT and not argv else b"$ "
    typed = b"tty && echo $((6 * 7)); exit 5"
    said, code = in_terminal(TERMINAL, *arguments, prompt=prompt, answer=typed, again=True)
    assert b"/dev/" in said and b"42" in said
    assert code == 5, said
