"""Choose the Python and the wheels from a board's probe output."""

from __future__ import annotations

import sys

import pytest

from hil.controller.devices.deploy.ensure import list_usable_interpreters
from hil.controller.devices.deploy.packages import (
    Interpreter,
    NoAgentHere,
    NoPython,
    list_platform_tags,
    make_pip_options,
)
from hil.controller.devices.deploy.probe import parse
from hil.errors import locate_errors

RASPBERRY = """\
Welcome to the board!
folder\t/home/pi/.hil
package\tnumpy-2.4.6-0123456789abcdef
machine\taarch64\tLinux
free\t1000
broken\t/usr/local/bin/python3\tpython3: error while loading shared libraries
python\t3.9\taarch64\tglibc-2.31\t/usr/bin/python3.9\t
python\t3.12\taarch64\tglibc-2.31\t/opt/my tools/python3.12\t
python\t3.12\taarch64\tglibc-2.31\t/opt/my tools/python3.12\t
python\t3.13\taarch64\tglibc-2.31\t/usr/bin/python3.13\tNo module named 'ctypes'
"""


def on(machine: str, libc: str) -> Interpreter:
    return Interpreter("/usr/bin/python3", (3, 11), machine, libc)


def test_parse_reads_probe_output():
    seen = parse(RASPBERRY)

    assert seen.folder == "/home/pi/.hil"
    assert seen.packages == {"numpy-2.4.6-0123456789abcdef"}
    assert seen.free_bytes == 1_024_000
    assert [one.path for one in seen.interpreters] == [
        "/usr/bin/python3.9",
        "/opt/my tools/python3.12",
        "/usr/bin/python3.13",
    ]
    assert seen.running is None and not seen.complete and not seen.noexec


def test_usable_interpreters_need_version_and_modules():
    assert [one.path for one in list_usable_interpreters(parse(RASPBERRY))] == ["/opt/my tools/python3.12"]


def test_usable_interpreters_prefer_local_version():
    lines = [f"python\t3.{minor}\tx86_64\tglibc-2.36\t/usr/bin/python3.{minor}\t" for minor in (10, 11, 12, 13, 14)]

    found = list_usable_interpreters(parse("\n".join(lines)))

    here = sys.version_info[1]
    others = [minor for minor in (13, 12, 11, 10, 14) if minor != here]
    assert [one.version[1] for one in found] == [here, *others]


def test_missing_python_error_lists_interpreters_and_fix():
    old = "\n".join(line for line in RASPBERRY.splitlines() if "3.12" not in line)

    with pytest.raises(NoPython) as caught, locate_errors(stage="deploy", board="pi"):
        list_usable_interpreters(parse(old))

    assert "3.10" in caught.value.message
    assert 'runtime.kind = "command"' in caught.value.hint
    for told in ("/usr/bin/python3.9", "No module named 'ctypes'", "error while loading shared libraries"):
        assert told in caught.value.detail
    assert (caught.value.stage, caught.value.board) == ("deploy", "pi")


def test_board_without_linux_raises_error():
    with pytest.raises(NoAgentHere, match="FreeBSD"):
        list_usable_interpreters(parse("machine\tarm64\tFreeBSD\n"))


@pytest.mark.parametrize(
    ("interpreter", "tag", "fits"),
    [
        (on("aarch64", "glibc-2.36"), "manylinux_2_28_aarch64", True),
        (on("aarch64", "glibc-2.28"), "manylinux_2_28_aarch64", True),
        (on("aarch64", "glibc-2.27"), "manylinux_2_28_aarch64", False),
        (on("aarch64", "glibc-2.27"), "manylinux2014_aarch64", True),
        (on("aarch64", "glibc-2.36"), "manylinux_2_28_x86_64", False),
        (on("aarch64", "glibc-2.36"), "manylinux2010_aarch64", False),
        (on("x86_64", "glibc-2.36"), "manylinux2010_x86_64", True),
        (on("x86_64", "glibc-2.16"), "manylinux2014_x86_64", False),
        (on("x86_64", "musl-1.2"), "musllinux_1_2_x86_64", True),
        (on("x86_64", "musl-1.1"), "musllinux_1_2_x86_64", False),
        (on("x86_64", "musl-1.2"), "manylinux_2_28_x86_64", False),
        (on("armv7l", "glibc-2.36"), "manylinux_2_31_armv7l", True),
        (on("armv7l", "glibc-2.36"), "manylinux_2_28_aarch64", False),
    ],
)
def test_platform_tags_depend_on_machine_and_libc(interpreter: Interpreter, tag: str, fits: bool):
    assert (tag in list_platform_tags(interpreter)) is fits


@pytest.mark.parametrize("libc", ["", "bionic", "glibc-3.1"])
def test_unknown_libc_has_empty_platform_tags(libc: str):
    assert list_platform_tags(on("x86_64", libc)) == []


def test_pip_options_use_board_python_and_never_build():
    options = make_pip_options(on("aarch64", "glibc-2.17"))

    assert "--only-binary=:all:" in options
    assert "--python-version=311" in options
    assert [option for option in options if "abi" in option] == ["--abi=cp311", "--abi=abi3", "--abi=none"]
    assert [option for option in options if "platform" in option] == [
        "--platform=manylinux_2_17_aarch64",
        "--platform=manylinux2014_aarch64",
    ]
