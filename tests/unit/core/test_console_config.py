"""The tables [console] and [provision] of a board config."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from hil.core.board_parser import parse_board
from hil.core.boards import LoadedBoard
from hil.core.console_config import BUILT_IN_PATTERNS
from hil.core.line_pattern import MATCHED_CHARACTERS, LinePattern, check_pattern
from hil.errors import UsageError


def parse(text: str, folder: Path = Path("/configs")):
    return parse_board(f'[board]\nhw_type = "x"\n{text}', folder / "x.toml")


def test_console_is_parsed():
    config = parse(
        """
        [console]
        command = ["./console.sh", "-v"]
        boot = "login:"
        boot_s = 5
        [[console.patterns]]
        name = "npu"
        pattern = "npu[0-9]+: fault"
        meaning = "the accelerator stopped"
        [provision]
        command = "flash --to sd {image}"
        """
    )
    assert config.console.command == ("/configs/console.sh", "-v")
    assert (config.console.boot, config.console.boot_s, config.console.is_set) == ("login:", 5.0, True)
    assert config.console.patterns[0].meaning == "the accelerator stopped"
    assert config.provision.command == ("flash", "--to", "sd", "{image}")
    assert {"[console] command", "[provision] command"} <= set(config.asks)
    assert not parse("").console.is_set


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[console]\nboot = "x"', "[console] has no link"),
        ('[console]\nserial = "/dev/x"\naddress = "tcp://a:1"', "[console] defines serial and address"),
        ('[console]\naddress = "lab:4001"', "[console] address is 'lab:4001'"),
        ('[console]\naddress = "tcp://lab:0"', "[console] address is"),
        ('[console]\naddress = "ssh://lab:22"', "[console] address is"),
        ('[console]\nserial = "/dev/x"\nbaud = 1', "baud must be a number from 50"),
        ("[console]\nserial = 1", "serial must be text"),
        ('[console]\nserial = "/dev/x"\nboot = "("', "boot: invalid regular expression"),
        ('[console]\nserial = "/dev/x"\nboot = "(a+)+"', "boot: slow regular expression"),
        ('[console]\nserial = "/dev/x"\nboot_s = 0', "boot_s must be a number of seconds above 0"),
        ('[console]\nserial = "/dev/x"\nspeed = 9600', "unknown key 'speed'"),
        ('[console]\nserial = "/dev/x"\npatterns = ["x"]', "patterns must be a list of tables"),
        ('[console]\nserial = "/dev/x"\npatterns = [{ name = "x" }]', "missing key pattern"),
        ("[console]\ncommand = []", "command must be a command"),
        ("[provision]\ntimeout_s = 1", "[provision] has no command"),
        ('[provision]\ncommand = ["flash"]', "command does not contain {image}"),
        ('[provision]\ncommand = ["flash", "{image}"]\nsize = 1', "unknown key 'size'"),
    ],
)
def test_invalid_tables_are_usage_errors(text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as found:
        parse(text)
    assert "/configs/x.toml" in found.value.message


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+$", "(a|aa)+$", "(?:x*)*", "((a|b))+", "a.*b.*c.*d.*e", "x" * 201),
        *("(a?){30}a{30}", "a?" * 30 + "a" * 30, "(a|aa)" * 30 + "b", "(a.|.a|..)" * 15 + "b"),
        "(?x) a # [\n(a+)+b # ]",
    ],
)
def test_slow_patterns_are_refused(pattern):
    with pytest.raises(UsageError, match="slow regular expression"):
        check_pattern(pattern, "here")


@pytest.mark.parametrize("pattern", ["login:", r"[*+|]+", r"\(a+\)+", "(panic|oops) at", "(?i)fault {0,3}x?", "(ab)+?"])
def test_fast_patterns_are_accepted(pattern):
    check_pattern(pattern, "here")


def test_built_in_patterns_are_valid_and_fast():
    texts = ["watchdog" * 64, "mmc0: " + "m" * 506, "a" * MATCHED_CHARACTERS, "thermal" * 73]
    began = time.process_time()
    for one in BUILT_IN_PATTERNS:
        check_pattern(one.pattern, one.name)
        assert one.meaning
        for text in texts:
            for _ in range(10):
                re.search(one.pattern, text[:MATCHED_CHARACTERS])
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "table",
    [
        '[console]\ncommand = ["./program"]',
        '[provision]\ncommand = ["./program", "{image}"]',
        '[mcu]\nchip = "mps2-an386"\nflash = ["./program", "{elf}"]',
        '[mcu]\nchip = "mps2-an386"\nreset = ["./program"]',
        '[mcu]\nchip = "mps2-an386"\nuart = "program"',
    ],
)
def test_program_is_part_of_trusted_digest(tmp_path, table):
    program = tmp_path / "program"
    program.write_text("echo 1")
    config = parse(table, tmp_path)
    before = LoadedBoard(config, config.path, True).digest
    program.write_text("echo 2")
    assert LoadedBoard(config, config.path, True).digest != before


def test_pattern_with_repetitions_is_fast_for_hostile_line() -> None:
    patterns = {
        ".*a.*b.*c": 288,
        "a.*b.*c": 288,
        "a.*b.*c.*d": 98,
        "a.*b": MATCHED_CHARACTERS,
        "a.*b?c": 2000,
        "(a.|.a|..)" * 5 + "b": 3906,
    }
    for pattern, length in patterns.items():
        check_pattern(pattern, "here")
        expression = LinePattern(pattern)
        assert expression.max_characters == min(length, MATCHED_CHARACTERS)
        start = time.process_time()
        for _ in range(10):
            expression.matches("ab" * 300)
        assert time.process_time() - start < 1.0


def test_line_pattern_matches_start_of_line() -> None:
    assert LinePattern(".*a.*b.*c").matches("1 a 2 b 3 c")
    assert LinePattern("(?i).*PANIC").matches("kernel panic")
    assert not LinePattern("a.*b.*c").matches("a" * 150 + "b" * 150 + "c")
    assert LinePattern("c", is_fast=True).max_characters == MATCHED_CHARACTERS


@pytest.mark.parametrize("pattern", [".*a.*b.*c.*d.*e", "a?a?a?a?a?a?a?.*a.*z", "(a|b)?(a|b)?.*b.*c.*z"])
def test_pattern_for_too_short_part_of_line_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"allow only [0-9]+ characters of a line; the minimum is 64"):
        check_pattern(pattern, "here")
