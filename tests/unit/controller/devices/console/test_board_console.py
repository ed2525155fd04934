"""Quotes of console lines in errors, boot times, and the file of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hil.controller.devices.console import recording as recording_module
from hil.controller.devices.console.board_console import use_console
from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.recording import ConsoleRecording
from hil.controller.devices.power_control.power import recover
from hil.core.board_config import BoardConfig, Command, Power
from hil.core.clock import ClockFit
from hil.core.console_config import ConsoleConfig, ConsolePattern
from hil.errors import BoardLost, BoardUnreachable, LoadFailed, RunCrashed


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_config(script: str, **values: object) -> BoardConfig:
    return BoardConfig("b", "b", console=ConsoleConfig(command=("sh", "-c", script), **values))


def line(text: str, at: int = 1) -> ConsoleLine:
    return ConsoleLine(at, at / 1e9, text)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[    1.2] Kernel panic - not syncing: VFS", "kernel panic"),
        ("Unable to handle kernel NULL pointer dereference at 0", "kernel oops"),
        ("Internal error: Oops: 96000004 [#1] SMP", "kernel oops"),
        ("Out of memory: Killed process 412 (hil-worker)", "out of memory"),
        ("python invoked oom-killer: gfp_mask=0x0", "out of memory"),
        ("hwmon hwmon1: Undervoltage detected!", "undervoltage"),
        ("watchdog: BUG: soft lockup - CPU#0 stuck for 22s!", "watchdog"),
        ("imx2-wdt: watchdog0: watchdog did not stop!", "watchdog"),
        ("***** HARD FAULT *****", "hard fault"),
        ("HardFault_Handler: CFSR=0x8200", "hard fault"),
        ("E: Bus Fault", "hard fault"),
        ("hil-worker[77]: segfault at 0 ip 0000", "segmentation fault"),
        ("mmc0: Timeout waiting for hardware interrupt.", "storage error"),
        ("I/O error, dev mmcblk0, sector 8", "storage error"),
        ("thermal thermal_zone0: critical temperature reached", "overheating"),
        ("Booting Linux on physical CPU 0x0", ""),
    ],
)
def test_built_in_patterns_match_messages(text, pattern):
    recording = ConsoleRecording()
    recording.add([line(text)])
    assert [quote.pattern for quote in recording.find_quotes()] == [pattern] * bool(pattern)


def test_pattern_of_config_takes_precedence():
    recording = ConsoleRecording([ConsolePattern("npu", "npu0: BUG", "the accelerator stopped")])
    recording.add([line("npu0: BUG: fault")])
    (quote,) = recording.find_quotes()
    assert (quote.pattern, quote.meaning, quote.text) == ("npu", "the accelerator stopped", "npu0: BUG: fault")


def test_recording_keeps_first_and_last_part(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_module, "PART_BYTES", 1000)
    recording = ConsoleRecording()
    recording.add([line(f"line {number}", number) for number in range(100)])
    stored = recording.save(tmp_path, "consoles/b.jsonl", "b")
    entries = [json.loads(text) for text in (tmp_path / stored.file).read_text().splitlines()]
    texts = [one["text"] for one in entries]
    assert (texts[0], texts[-1]) == ("line 0", "line 99")
    assert stored.lines == 100
    assert 0 < stored.omitted < 100
    (note,) = [one for one in entries if one["kind"] == "note"]
    assert note["text"] == f"{stored.omitted} lines omitted"
    assert len(entries) == 101 - stored.omitted


def test_empty_recording_writes_no_file(tmp_path):
    stored = ConsoleRecording().save(tmp_path, "consoles/b.jsonl", "b")
    assert (stored.file, stored.lines) == ("", 0)
    assert list(tmp_path.iterdir()) == []


def test_lines_have_board_time_of_the_clock_that_ran(tmp_path):
    recording = ConsoleRecording()
    recording.add([line("first boot", 2_000), line("second boot", 9_000)])
    recording.set_clock(ClockFit(offset_ns=-1_000, drift=0.0, at_host_ns=0, error_ns=1))
    recording.set_clock(ClockFit(offset_ns=-8_000, drift=0.0, at_host_ns=0, error_ns=1))
    recording.add([line("before every boot", 500)])
    stored = recording.save(tmp_path, "c.jsonl", "b")
    times = [json.loads(text)["board_ns"] for text in (tmp_path / stored.file).read_text().splitlines()]
    assert times == [1_000, 1_000, None]


@pytest.mark.parametrize("kind", [BoardLost, RunCrashed])
def test_error_quotes_console_once(kind):
    with use_console(make_config("echo 'Kernel panic - not syncing: test'; cat"), pytest.fail) as console:
        assert console._reader.wait_for("Kernel panic", 0, 60)
        error = kind("it stopped")
        console.explain(error)
        console.explain(error)
        assert error.message == 'it stopped; console: "Kernel panic - not syncing: test" (the kernel stopped)'
        assert [quote.pattern for quote in error.console] == ["kernel panic"]
        assert error.as_kind(BoardLost).console == error.console
        other = LoadFailed("wrong file")
        console.explain(other)
        assert (other.message, other.console) == ("wrong file", ())
        console.end_case()
        later = kind("it stopped again")
        console.explain(later)
        assert later.console == ()


def test_boot_waits_for_pattern_after_the_action():
    said: list[str] = []
    config = make_config("echo 'old login:'; sleep 0.3; echo 'new login:'; cat", boot="login:", boot_s=60)
    with use_console(config, said.append) as console:
        assert console._reader.wait_for("old login:", 0, 60)
        with console.time_boot():
            pass
        assert console.boot.args["line"] == "new login:"
        assert console.boot_s > 0
        assert said == [f"b booted in {console.boot_s:.1f} s"]
        assert console.take_boot() is console.boot
        assert console.take_boot() is None


def test_boot_without_pattern_in_time_quotes_console():
    config = make_config("read line; echo 'Kernel panic - not syncing: no root'; cat", boot="login:", boot_s=2.0)
    with use_console(config, pytest.fail) as console:
        with (
            pytest.raises(BoardUnreachable, match=r"did not show 'login:' within 2 s") as found,
            console.time_boot(),
        ):
            console._reader.write(b"\n")
            assert console._reader.wait_for("Kernel panic", 0, 60)
        assert found.value.detail == "Kernel panic - not syncing: no root"
        assert found.value.console[0].pattern == "kernel panic"


def test_recovery_waits_for_boot_and_tries_cycle():
    done: list[str] = []
    said: list[str] = []
    power = Power({"reset": Command(("true",)), "cycle": Command(("true",))}, boot_s=5)
    config = make_config("read line; echo login:; cat", boot="login:", boot_s=0.3)

    def connect() -> str:
        if "cycle" not in done:
            raise BoardUnreachable("no answer")
        return "connected"

    with use_console(config, said.append) as console:

        def time_boot():
            done.append("cycle" if "reset" in done else "reset")
            if done[-1] == "cycle":
                console._reader.write(b"\n")
            return console.time_boot()

        assert recover(connect, power, board="b", say=said.append, time_boot=time_boot) == "connected"
    assert done == ["reset", "cycle"]
    assert any("did not boot" in text for text in said)


def test_unreachable_console_is_a_note():
    said: list[str] = []
    config = BoardConfig("b", "b", console=ConsoleConfig(address="tcp://127.0.0.1:1"))
    with use_console(config, said.append) as console:
        with console.time_boot():
            pass
        console.explain(BoardLost())
    assert said == ["cannot open console tcp://127.0.0.1:1: Connection refused; continuing without the console"]
    with use_console(BoardConfig("b", "b"), pytest.fail) as nothing:
        assert nothing is None
