"""What a board answers over SSH may be anything: reading it gives a value, or an error of the board."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.devices.agentless import scripts
from hil.controller.devices.deploy import probe
from hil.controller.devices.deploy.packages import Interpreter, platform_tags
from hil.formats.iree_command import times_ns

ODD = ["²", "٣", "9" * 6000, "-1", "1e400", "nan", "", "\0", "3.²", "3." + "1" * 5000]
WORDS = st.one_of(
    st.sampled_from(
        [*ODD, "folder", "up", "python", "free", "used", "busy", "installed", "package", "machine", "left"]
    ),
    st.sampled_from(["hil-command", "hil-command 0 0", "glibc-2." + "9" * 50, "x86_64", "3.11", "-", "."]),
    st.text(max_size=20),
)
LINES = st.lists(st.lists(WORDS, min_size=1, max_size=6), max_size=8)


@pytest.mark.parametrize("number", ODD)
def test_odd_numbers_of_a_probe_are_none(number: str) -> None:
    seen = probe.parse(f"folder\t/x\nfree\t{number}\nup\t{number}\tb\npython\t{number}.1\tm\tl\tp\t\n")
    assert seen.free_bytes is None
    assert seen.running == (0, "b")
    assert seen.interpreters == ()


def test_a_libc_of_many_digits_has_no_wheels() -> None:
    assert platform_tags(Interpreter("p", (3, 11), "x86_64", "glibc-2." + "9" * 12)) == []


@settings(max_examples=300)
@given(LINES)
def test_any_text_of_a_probe_is_read(lines: list[list[str]]) -> None:
    for one in probe.parse("\n".join("\t".join(words) for words in lines)).interpreters:
        platform_tags(one)


@settings(max_examples=300)
@given(LINES)
def test_any_text_of_a_command_is_read(lines: list[list[str]]) -> None:
    text = "\n".join(" ".join(words) for words in lines)
    scripts.ended(text)
    scripts.free_bytes(text)
    parts = scripts.parts(text)
    scripts.machine({**parts, "meminfo": f"MemTotal: {text} kB", "cpuinfo": text, "auxv": text, "arch": "aarch64"})
    for reading in scripts.readings("\n".join(":".join(words) for words in lines)):
        assert math.isfinite(reading.get("value", 0))


@pytest.mark.parametrize("number", ODD)
def test_odd_numbers_of_readings_are_left_out(number: str) -> None:
    text = f"/sys/policy0/scaling_cur_freq:{number}\n/proc/meminfo:MemFree: {number} kB\n/x{number}/temp:{number}"
    assert all(math.isfinite(one["value"]) for one in scripts.readings(text))


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, 1e300, "x", None, [], {}])
def test_times_that_nothing_takes_are_refused(value: object) -> None:
    row = {"run_type": "iteration", "real_time": value, "time_unit": "ns"}
    with pytest.raises(ValueError, match=r"it |cannot|convert|NaN|has no"):
        times_ns(json.dumps({"benchmarks": [row]}).encode())
