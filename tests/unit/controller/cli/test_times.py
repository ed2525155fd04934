"""Test moments in options of `hil farm`."""

from __future__ import annotations

from datetime import datetime, timezone

import click
import pytest

from hil.controller.cli import main
from hil.controller.cli.times import parse_future, parse_past
from hil.errors import UsageError

# A Wednesday.
NOW = datetime(2026, 11, 25, 14, 30).astimezone()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2h", (2026, 11, 25, 12, 30)),
        ("90m", (2026, 11, 25, 13, 0)),
        ("1w", (2026, 11, 18, 14, 30)),
        ("9:00", (2026, 11, 25, 9, 0)),
        ("18:00", (2026, 11, 24, 18, 0)),
        ("today", (2026, 11, 25, 0, 0)),
        ("yesterday 8:15", (2026, 11, 24, 8, 15)),
        ("mon", (2026, 11, 23, 0, 0)),
        ("Mon 9:00", (2026, 11, 23, 9, 0)),
        ("wed 9:00", (2026, 11, 25, 9, 0)),
        ("wednesday 15:00", (2026, 11, 18, 15, 0)),
        ("2026-11-20", (2026, 11, 20, 0, 0)),
        ("2026-11-20 9:05", (2026, 11, 20, 9, 5)),
        ("2026-11-20T09:05", (2026, 11, 20, 9, 5)),
    ],
)
def test_past_moments(text: str, found: tuple[int, ...]) -> None:
    assert parse_past(text, "--since", NOW) == datetime(*found).astimezone()  # type: ignore[arg-type]


def test_moment_in_utc() -> None:
    assert parse_past("2026-11-20T09:05:00Z", "--since", NOW) == datetime(2026, 11, 20, 9, 5, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30m", (2026, 11, 25, 15, 0)),
        ("15:00", (2026, 11, 25, 15, 0)),
        ("9:00", (2026, 11, 26, 9, 0)),
        ("tomorrow 9:00", (2026, 11, 26, 9, 0)),
        ("mon 9:00", (2026, 11, 30, 9, 0)),
        ("wed 15:00", (2026, 11, 25, 15, 0)),
        ("wed 9:00", (2026, 12, 2, 9, 0)),
        ("2026-12-24 18:00", (2026, 12, 24, 18, 0)),
    ],
)
def test_future_moments(text: str, found: tuple[int, ...]) -> None:
    assert parse_future(text, "--at", NOW) == datetime(*found).astimezone()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "x", "9", "25:00", "mo 9:00", "monkey", "mon 9", "9:00 mon", "2026-13-01", "1e9d", "99999d", "9:00 9:00 9:00"],
)
def test_invalid_moments_are_rejected(text: str) -> None:
    for parse in (parse_past, parse_future):
        with pytest.raises(UsageError, match="invalid --x"):
            parse(text, "--x", NOW)


def test_moments_in_wrong_direction_are_rejected() -> None:
    with pytest.raises(UsageError, match="in the future"):
        parse_past("tomorrow", "--since", NOW)
    with pytest.raises(UsageError, match="in the past"):
        parse_future("2026-11-20", "--at", NOW)


def list_time_options(command: click.Command, context: click.Context) -> list[click.Option]:
    """Return the options with a moment."""
    if isinstance(command, click.Group):
        found = [command.get_command(context, name) for name in command.list_commands(context)]
        return [option for one in found if one for option in list_time_options(one, context)]
    return [
        one
        for one in command.params
        if isinstance(one, click.Option) and one.metavar == "TIME" and {"--since", "--at"} & set(one.opts)
    ]


def test_help_of_moments_names_local_time() -> None:
    options = list_time_options(main.cli, click.Context(main.cli))
    assert len(options) >= 5
    assert [one.help for one in options if "(local time)" not in (one.help or "")] == []
