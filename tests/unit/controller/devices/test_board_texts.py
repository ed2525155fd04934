"""Parse arbitrary board output over SSH: return a value or raise a board error."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.devices.agentless import scripts
from hil.controller.devices.deploy import probe
from hil.controller.devices.deploy.packages import Interpreter, list_platform_tags
from hil.formats.iree_command import read_times_ns

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
def test_probe_ignores_invalid_numbers(number: str) -> None:
    seen = probe.parse(f"folder\t/x\nfree\t{number}\nup\t{number}\tb\npython\t{number}.1\tm\tl\tp\t\n")
    assert seen.free_bytes is None
    assert seen.running == (0, "b")
    assert seen.interpreters == ()


def test_libc_with_many_digits_has_empty_platform_tags() -> None:
    assert list_platform_tags(Interpreter("p", (3, 11), "x86_64", "glibc-2." + "9" * 12)) == []


@pytest.mark.ci
@settings(max_examples=300)
@given(LINES)
def test_probe_parses_any_text(lines: list[list[str]]) -> None:
    python = "python\t3.11\tx86_64\tglibc-2.35\t/usr/bin/python3\t"
    seen = probe.parse("\n".join(["\t".join(words) for words in lines] + [python]))
    assert "/usr/bin/python3" in [one.path for one in seen.interpreters]
    for one in seen.interpreters:
        assert all(tag.endswith(f"_{one.machine}") for tag in list_platform_tags(one))


@pytest.mark.ci
@settings(max_examples=300)
@given(LINES)
def test_command_output_parses_any_text(lines: list[list[str]]) -> None:
    text = "\n".join(" ".join(words) for words in lines)
    scripts.parse_end(text)
    scripts.free_bytes(text)
    parts = scripts.split_parts(text)
    scripts.parse_machine(
        {**parts, "meminfo": f"MemTotal: {text} kB", "cpuinfo": text, "auxv": text, "arch": "aarch64"}
    )
    for reading in scripts.parse_readings("\n".join(":".join(words) for words in lines)):
        assert math.isfinite(reading.get("value", 0))


@pytest.mark.parametrize("number", ODD)
def test_readings_drop_invalid_numbers(number: str) -> None:
    text = f"/sys/policy0/scaling_cur_freq:{number}\n/proc/meminfo:MemAvailable: {number} kB\n/x/temp:{number}"
    found = {one["name"]: one["value"] for one in scripts.parse_readings(f"{text}\n/x/type:cpu")}
    # float() accepts a sign, long fractions and other scripts' digits.
    values = {"-1": -0.001, "٣": 0.003, "3." + "1" * 5000: pytest.approx(0.00311111)}
    assert found == ({"cpu0 frequency": values[number], "x (cpu)": values[number]} if number in values else {})


def test_readings_contain_valid_numbers() -> None:
    text = "/sys/policy0/scaling_cur_freq:1500000\n/proc/meminfo:MemAvailable: 2048 kB\n/x/temp:45000\n/x/type:cpu"
    found = {one["name"]: one["value"] for one in scripts.parse_readings(text)}
    assert found == {"cpu0 frequency": 1500, "x (cpu)": 45, "free memory": 2}


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, 1e300, "x", None, [], {}])
def test_times_ns_rejects_invalid_times(value: object) -> None:
    row = {"run_type": "iteration", "real_time": value, "time_unit": "ns"}
    with pytest.raises(ValueError, match=r"invalid (time|value)|convert|NaN"):
        read_times_ns(json.dumps({"benchmarks": [row]}).encode())
