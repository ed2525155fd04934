"""The table [peak] of board configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.core.board_parser import parse_board
from hil.core.peak_config import PeakConfig
from hil.errors import UsageError


def test_table_sets_the_values_of_a_data_sheet() -> None:
    config = parse_board("[peak]\nf32_gflops = 76.8\nint8_gops = 307\nmemory_gb_s = 12.8\n", Path("kit.toml"))
    assert config.peak == PeakConfig(f32_gflops=76.8, int8_gops=307.0, memory_gb_s=12.8)
    assert config.asks == ()  # numbers need no trust


def test_config_without_the_table_has_no_peaks() -> None:
    assert parse_board("", Path("kit.toml")).peak == PeakConfig()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("f32_gflops = 0", "f32_gflops must be a number from 1e-06 to 1e\\+11"),
        ("memory_gb_s = -1", "memory_gb_s must be a number from 1e-06 to 1e\\+11"),
        ("memory_gb_s = inf", "memory_gb_s must be a number from 1e-06 to 1e\\+11"),
        ("memory_gb_s = nan", "memory_gb_s must be a number from 1e-06 to 1e\\+11"),
        ("memory_gb_s = 1e-300", "memory_gb_s must be a number from"),
        (f"f32_gflops = 1{400 * '0'}", "f32_gflops must be a number from"),
        ('memory_gb_s = "12"', "memory_gb_s must be a number from 1e-06 to 1e\\+11"),
        ("f32_gflops = true", "f32_gflops must be a number from 1e-06 to 1e\\+11"),
        ("f32_gflop = 1", "unknown key 'f32_gflop'"),
    ],
)
def test_invalid_values_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_board(f"[peak]\n{line}\n", Path("kit.toml"))
