"""Commands over SSH: what goes in, what comes out, how they end."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sshd import IS_ROOT, Sshd

from hil.controller.devices.ssh.shell import Shell, execute
from hil.errors import BoardError, BoardLost

pytestmark = pytest.mark.daily


def test_arguments_arrive_as_they_are(shell: Shell) -> None:
    words = ["a b", "$HOME", "`id`", "*", "'\"", "", "-n", "; true", "ü\n\t\\", "~"]
    done = shell.run(["sh", "-c", 'for one; do printf "%s|" "$one"; done', "sh", *words])
    assert done.out.decode() == "".join(f"{word}|" for word in words)


def test_input_comes_from_bytes_or_a_file_and_otherwise_ends_at_once(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"from a file")
    assert shell.run(["cat"], stdin=b"bytes").out == b"bytes"
    assert shell.run(["cat"], stdin=tmp_path / "in").text == "from a file"
    assert shell.run(["cat"]).out == b""


class Held(io.BytesIO):
    """Input that is read only when that is allowed."""

    allowed = threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self.allowed.wait(60)
        return super().read(size)


def test_a_command_may_end_before_its_input_was_read(shell: Shell) -> None:
    source = Held(b"unread")
    assert execute(shell.transport, "true", source, io.BytesIO().write, timeout=60)[0] == 0
    source.close()
    source.allowed.set()
    # What a thread dies of is an error of the test.
    for feeder in (thread for thread in threading.enumerate() if thread.name == "hil-ssh-input"):
        feeder.join(60)


def test_much_goes_both_ways_at_once(shell: Shell) -> None:
    data = os.urandom(8 << 20)
    assert shell.run(["sh", "-c", "tee /dev/stderr"], stdin=data, timeout=120).out == data


def test_a_command_that_fails_says_so_in_its_own_words(shell: Shell) -> None:
    with pytest.raises(BoardError, match="failed with code 3") as failed:
        shell.run(["sh", "-c", "echo out of cheese >&2; exit 3"])
    assert failed.value.detail == "out of cheese"
    assert failed.value.board == "b"
    assert shell.run(["sh", "-c", "exit 3"], check=False).code == 3


@pytest.mark.parametrize("way", [["exec", "sh", "-c"], ["sh", "-c"]], ids=["told by SSH", "told by the shell"])
def test_a_signal_that_ended_a_command_is_known(shell: Shell, way: list[str]) -> None:
    assert shell.run([*way, "kill -ILL $$"], check=False).code == 132


def test_a_command_that_writes_without_end_is_stopped(shell: Shell) -> None:
    with pytest.raises(BoardError, match="`yes` wrote more than 16 MiB"):
        shell.run(["yes"], timeout=120)
    assert shell.run(["echo", "still here"]).text == "still here"


def test_only_the_end_of_much_stderr_is_kept(shell: Shell) -> None:
    done = shell.run(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x >&2; echo end >&2"], timeout=120)
    assert done.err.endswith("x\nend\n") or done.err.endswith("xend\n")
    assert len(done.err) == 64 << 10


def test_a_command_that_does_not_end_is_left_and_named(shell: Shell) -> None:
    with pytest.raises(BoardLost, match=r"`sleep 1000` did not answer within 0.5 s"):
        shell.run(["sleep", "1000"], timeout=0.5)
    assert shell.run(["echo", "still here"]).text == "still here"


def test_a_program_that_is_not_there(shell: Shell) -> None:
    assert shell.run(["no-such-program"], check=False).code == 127


def test_small_pieces_are_not_held_back_and_fast_ciphers_come_first(shell: Shell) -> None:
    assert shell.transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert shell.transport.local_cipher == "aes128-gcm@openssh.com"


def test_who_and_where_we_are(shell: Shell, sshd: Sshd) -> None:
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


@pytest.mark.parametrize("path", ["", "/nowhere"], ids=["OpenSSH", "fabric"])
@pytest.mark.parametrize("argv", [[], ["sh", "-c", "PS1='$ ' exec sh -i"]], ids=["login shell", "command"])
def test_the_terminal_is_given_away(
    sshd: Sshd, in_terminal: Callable[..., tuple[bytes, int]], path: str, argv: list[str]
) -> None:
    arguments = [sshd.address, str(sshd.identity), str(sshd.known_hosts), *argv]
    prompt = b"# " if IS_ROOT and not argv else b"$ "
    typed = b"tty && echo $((6 * 7)); exit 5"
    said, code = in_terminal(TERMINAL, *arguments, prompt=prompt, answer=typed, again=True, path=path)
    assert b"/dev/" in said and b"42" in said
    assert code == 5, said
