"""Completion in the shells, with the scripts of `hil completion`. A user types in a terminal."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support.terminals import Terminal, terminal

TAB, HOME, ENTER = b"\t", b"\x01", b"\r"
# Shell -> its command, and the lines that install the script.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ['eval "$(hil completion bash)"']),
    "zsh": (["zsh", "-f", "-i"], ["bindkey -e; autoload -U compinit; compinit -D -u", 'eval "$(hil completion zsh)"']),
    "fish": (["fish", "--no-config", "-i"], ["hil completion fish | source"]),
}
# Execute a program in place of Python.
_EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.mark.daily
@pytest.mark.parametrize(
    ("line", "expected"), [("hil ru", {"run", "runs"}), ("hil run --runtime-hw", {"--runtime-hw-type"})]
)
def test_completion_lists_commands_and_options(hil, environment, line, expected):
    """Scripts of earlier versions pass the words."""
    environment.update(_HIL_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(line.split()) - 1))
    ended = hil()
    assert ended.code == 0, ended.err
    assert {text.partition(",")[2] for text in ended.out.split()} == expected


def complete_line(shell: Terminal, typed: bytes, expected: bytes) -> None:
    """Type the start of a line and TAB. Then let the shell print the line."""
    shell.type(typed + TAB)
    shell.type(HOME + b'echo "MA""RK" ' + b"\x05" + b" END" + ENTER)
    shell.wait_for(b"MARK " + expected + b" END")


@pytest.mark.parametrize("name", SHELLS)
def test_shell_completes_values(name, environment, tmp_path):
    command, lines = SHELLS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    bin_folder, boards = tmp_path / "bin", tmp_path / "boards"
    for folder in (bin_folder, boards, tmp_path / "work"):
        folder.mkdir()
    (bin_folder / "hil").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hil "$@"\n')
    (bin_folder / "hil").chmod(0o755)
    (boards / "kitchen.toml").write_text("")
    (tmp_path / "work" / "digits.onnx").write_text("")
    environment |= {
        "PATH": f"{bin_folder}:{environment['PATH']}",
        "HIL_BOARDS": str(boards),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PS1": "$ ",
    }
    with terminal("-c", _EXECUTE, *command, cwd=tmp_path / "work", env=environment) as shell:
        for line in (*lines, 'echo "REA""DY"'):
            shell.type(line.encode() + ENTER)
        shell.wait_for(b"READY")
        complete_line(shell, b"hil run digi", b"hil run digits.onnx")
        complete_line(shell, b"hil run --board kitch", b"hil run --board kitchen")
        complete_line(shell, b"hil run --board=kitch", b"hil run --board=kitchen")
        complete_line(shell, b"hil run --fault corr", b"hil run --fault corrupt")
        complete_line(shell, b"hil run --fault corrupt:elem", b"hil run --fault corrupt:elements=")
        complete_line(shell, b"hil run --input image=digi", b"hil run --input image=digits.onnx")
        shell.type(b"exit" + ENTER)
