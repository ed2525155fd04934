"""Messages of `hil notify`, its output, and the file with the announced causes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hil.controller.records.base import Record, Timestamp, note
from hil.controller.records.pages.common import BaselineName, CauseSummary

MAX_ANNOUNCED = 10_000


class NotifiedCause(CauseSummary, kw_only=True):
    """Cause in a message."""

    cases: Annotated[int, note("number of cases; `names` has at most 20")]
    owners: Annotated[list[str], note("owners by triage")]
    url: Annotated[str, note("page of the cause; empty without the address of hil web")]


class NightMessage(Record, kw_only=True):
    """JSON body of a message."""

    schema: Literal[1] = 1
    event: Annotated[Literal["cause", "digest"], note("a message for one cause, or for all new causes")]
    title: str
    baseline: BaselineName
    causes: list[NotifiedCause]
    url: Annotated[str, note("home page with these causes; empty without the address of hil web")]


class NotifyReport(Record, kw_only=True):
    """Output of `hil notify`."""

    baseline: BaselineName
    dry_run: bool
    receiver: Annotated[str, note("scheme and host of the webhook, or the repository")]
    sent: Annotated[list[str], note("titles of the messages; with --dry-run, the messages that hil would send")]
    announced: Annotated[int, note("causes that earlier messages contained")]
    known: Annotated[int, note("causes whose cases are all known failures by triage")]
    is_cut: Annotated[bool, note("true if there are more changed cases than hil reads; older cases are left out")]


class AnnouncedCause(Record, kw_only=True):
    """Cause that a message contained."""

    receiver: Annotated[str, note("digest of the receiver's address")]
    key: str
    time: Timestamp


class AnnouncedDocument(Record, kw_only=True):
    """File with the announced causes: hil-notify.json."""

    schema: Literal[1]
    announced: Annotated[list[AnnouncedCause], Meta(max_length=MAX_ANNOUNCED)]
