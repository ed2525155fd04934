"""Webhooks in ``farm.toml``: the tables ``[webhooks.NAME]``. Only the administrator of a gateway can set URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.farm.settings import WEBHOOKS_TABLE, read_settings_tables
from hil.controller.notify.delivery import MessageFormat, Webhook, check_webhook_url
from hil.errors import UsageError, did_you_mean

JOB_ENDED, BOARD_QUARANTINED, HOST_LOST = "job_ended", "board_quarantined", "host_lost"
EVENTS = (JOB_ENDED, BOARD_QUARANTINED, HOST_LOST)
_KEYS = ("url", "url_env", "secret", "secret_env", "format", "events", "failed_only")
_NAME = re.compile(r"[\w.-]{1,60}")
_MAX_WEBHOOKS = 50


@dataclass(frozen=True)
class FarmWebhook:
    """A receiver of the farm's events."""

    name: str
    receiver: Webhook = field(repr=False)
    format: MessageFormat = MessageFormat.JSON
    events: tuple[str, ...] = EVENTS
    failed_only: bool = False  # True to leave out jobs that passed


def load_webhooks(path: Path, environment: Mapping[str, str] = os.environ) -> tuple[FarmWebhook, ...]:
    """Read the webhooks of a gateway from its settings file.

    Raises:
        UsageError: the file is unreadable, a setting is unknown or invalid, or a variable is not set. The message does
            not contain the URL or the secret.
    """
    table = read_settings_tables(path).get(WEBHOOKS_TABLE, {})
    if not isinstance(table, dict) or len(table) > _MAX_WEBHOOKS:
        raise UsageError(f"{path}: [{WEBHOOKS_TABLE}] must be a table of at most {_MAX_WEBHOOKS} webhooks")
    return tuple(
        _parse_webhook(f"{path}: [{WEBHOOKS_TABLE}.{name}]", name, one, environment) for name, one in table.items()
    )


def _parse_webhook(place: str, name: str, table: Any, environment: Mapping[str, str]) -> FarmWebhook:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{place}: invalid name", hint="use at most 60 letters, digits and . _ -")
    if not isinstance(table, dict):
        raise UsageError(f"{place} must be a table")
    for key in table:
        if key not in _KEYS:
            raise UsageError(
                f"{place}: unknown setting {key!r}",
                hint=f"{did_you_mean(key, _KEYS)}known settings: {', '.join(_KEYS)}",
            )
    url = _read_secret(place, table, "url", environment)
    if not url:
        raise UsageError(f"{place}: missing url", hint="set url, or url_env with the name of a variable")
    secret = _read_secret(place, table, "secret", environment)
    events = table.get("events", list(EVENTS))
    if not isinstance(events, list) or not events:
        raise UsageError(f"{place}: events must be a list", hint=f"known events: {', '.join(EVENTS)}")
    for event in events:
        if event not in EVENTS:
            raise UsageError(f"{place}: unknown event {event!r}", hint=f"known events: {', '.join(EVENTS)}")
    try:
        kind = MessageFormat(table.get("format", MessageFormat.JSON.value))
    except ValueError:
        known = ", ".join(one.value for one in MessageFormat)
        raise UsageError(f"{place}: unknown format {table['format']!r}", hint=f"known formats: {known}") from None
    failed_only = table.get("failed_only", False)
    if not isinstance(failed_only, bool):
        raise UsageError(f"{place}: failed_only must be true or false")
    receiver = Webhook(check_webhook_url(url, place), secret)
    return FarmWebhook(name, receiver, kind, tuple(dict.fromkeys(events)), failed_only)


def _read_secret(place: str, table: Mapping[str, Any], key: str, environment: Mapping[str, str]) -> str:
    """Return a setting that can also be in an environment variable; "" if it is not set."""
    variable = f"{key}_env"
    if key in table and variable in table:
        raise UsageError(f"{place}: both {key} and {variable} are set", hint="remove one of them")
    value = table.get(key, table.get(variable, ""))
    if not isinstance(value, str):
        raise UsageError(f"{place}: {key} must be a string")
    if variable not in table:
        return value
    if not environment.get(value):
        raise UsageError(f"{place}: the variable {value} of {variable} is not set", hint="set it for the gateway")
    return environment[value]
