"""Messages of a farm's webhooks, and the state of the webhooks."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, UnsetType

from hil.controller.records.base import SCHEMA, Record, note
from hil.controller.records.lab.fields import JobName, KindName, Time, Whole, check_times, list_values

WebhookEvent = Annotated[str, list_values("job_ended", "board_quarantined", "host_lost", "test")]


class WebhookJob(Record, kw_only=True):
    """The job of a message `job_ended`."""

    name: JobName
    title: str
    kind: KindName
    user: str
    project: str
    state: str
    boards: Annotated[list[str], note("boards of the last attempt, in order")]
    outcome: str
    exit_code: Whole | None
    reason: str
    queued_at: Time
    started_at: Time | None
    finished_at: Time | None

    def __post_init__(self) -> None:
        check_times(self, "queued_at", "started_at", "finished_at")


class WebhookMessage(Record, kw_only=True):
    """Body of a message in the format `json`."""

    schema: int = SCHEMA
    id: Annotated[str, note("the same in all attempts to deliver the message, as in the header X-Hil-Delivery")]
    event: WebhookEvent
    at: Time
    text: Annotated[str, note("the event in a line")]
    reason: str
    job: WebhookJob | UnsetType = UNSET
    board: Annotated[str | UnsetType, note("board of `board_quarantined`")] = UNSET
    host: Annotated[str | UnsetType, note("host of `host_lost`")] = UNSET

    def __post_init__(self) -> None:
        check_times(self, "at")


class WebhookStatus(Record, kw_only=True):
    """A webhook of a gateway, without its secrets."""

    name: str
    receiver: Annotated[str, note("scheme and host of the URL")]
    format: str
    events: list[str]
    is_signed: bool
    waiting: Annotated[Whole, note("number of messages that are not delivered yet")]
    sent: Annotated[Whole, note("number of delivered messages")]
    failed: Annotated[Whole, note("number of messages that hil gave up")]
    sent_at: Annotated[Time | None, note("time of the last delivery")]
    error: Annotated[str, note("error of the last message that is not delivered")]

    def __post_init__(self) -> None:
        check_times(self, "sent_at")


class TestedWebhook(Record, kw_only=True):
    """Reply to the action `webhook`, and output of `hil farm webhooks test`."""

    webhook: str
    status: Annotated[Whole, note("HTTP status of the receiver")]
