"""Messages for webhooks in the database: register webhooks, take messages, and record deliveries.

The transaction that changes a job, board or host adds the messages (:mod:`hil.controller.farm.store.event_log`), so no
message is lost, and no message exists for a change that did not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from hil.controller.farm.database.database import Tx
from hil.controller.farm.store.records import fetch_rows, make_storable
from hil.controller.farm.webhooks.webhook_settings import FarmWebhook
from hil.controller.records.lab.webhooks import WebhookStatus

# A gateway that takes a message has this many seconds to deliver it. Then another gateway may take it.
CLAIM_SECONDS = 60.0
# Messages are given up after this many attempts or this time.
MAX_ATTEMPTS = 12
_MAX_AGE = "1 day"
# Events add no messages for webhooks that no gateway has had for this time.
PRESENT = "10 minutes"
_MAX_ERROR = 500
_REGISTER = """
    insert into hil.webhooks (name, events) values (%s, %s)
    on conflict (name) do update set events = excluded.events, seen_at = now()
"""
_CLAIM = f"""
    update hil.outbox set attempts = attempts + 1, next_at = clock_timestamp() + make_interval(secs => {CLAIM_SECONDS})
    where id = (
        select id from hil.outbox
        where webhook = %s and sent_at is null and failed_at is null and next_at <= clock_timestamp()
        order by next_at, id limit 1 for update skip locked
    )
    returning id, key, event, at, board, job, host, reason, attempts
"""
_EXPIRE = f"""
    update hil.outbox set failed_at = clock_timestamp(), error = coalesce(nullif(error, ''), 'not delivered in time')
    where webhook = %s and sent_at is null and failed_at is null
        and (attempts >= {MAX_ATTEMPTS} or at < clock_timestamp() - interval '{_MAX_AGE}')
        and next_at <= clock_timestamp()
"""
_STATUS = """
    select count(*) filter (where sent_at is null and failed_at is null)::int as waiting,
        count(*) filter (where sent_at is not null)::int as sent,
        count(*) filter (where failed_at is not null)::int as failed, max(sent_at) as sent_at,
        coalesce((array_agg(error order by id desc) filter (where error <> '' and sent_at is null))[1], '') as error
    from hil.outbox where webhook = %s
"""


@dataclass(frozen=True)
class OutboxMessage:
    """Message that this gateway delivers now."""

    id: int
    key: str
    event: str
    at: datetime
    board: str
    job: str
    host: str
    reason: str
    attempts: int  # with the current attempt


async def register_webhooks(tx: Tx, webhooks: Sequence[FarmWebhook]) -> None:
    """Store the names and events of this gateway's webhooks. Call it regularly: the farm forgets absent webhooks."""
    # Two gateways must update the rows in the same order. Otherwise, they could wait for each other.
    for one in sorted(webhooks, key=lambda webhook: webhook.name):
        await tx.execute(_REGISTER, [one.name, [*one.events]])
    await tx.execute(f"delete from hil.webhooks where seen_at < now() - interval '{PRESENT}'")
    await tx.execute("delete from hil.outbox where sent_at is null and at < now() - interval '7 days'")


async def claim_message(tx: Tx, webhook: str) -> OutboxMessage | None:
    """Take the next message of a webhook, so that no other gateway delivers it now. None if no message is due."""
    await tx.execute(_EXPIRE, [webhook])
    rows = await fetch_rows(tx, _CLAIM, [webhook])
    return OutboxMessage(**rows[0]) if rows else None


async def mark_sent(tx: Tx, message: int) -> None:
    """Record that a message was delivered, or that nobody wants it."""
    await tx.execute("update hil.outbox set sent_at = clock_timestamp(), error = '' where id = %s", [message])


async def mark_failed(tx: Tx, message: int, error: str, retry_s: float | None) -> None:
    """Record a failed attempt.

    Args:
        retry_s: time before the next attempt; None to give up.
    """
    text = make_storable(error[:_MAX_ERROR])
    if retry_s is None:
        query = "update hil.outbox set failed_at = clock_timestamp(), error = %s where id = %s"
        await tx.execute(query, [text, message])
        return
    query = "update hil.outbox set next_at = clock_timestamp() + make_interval(secs => %s), error = %s where id = %s"
    await tx.execute(query, [retry_s, text, message])


async def list_webhooks(tx: Tx, webhooks: Sequence[FarmWebhook]) -> list[WebhookStatus]:
    """Return the webhooks of this gateway with the numbers of their messages."""
    found = []
    for one in webhooks:
        [row] = await fetch_rows(tx, _STATUS, [one.name])
        sent_at = row.pop("sent_at")
        found.append(
            WebhookStatus(
                name=one.name,
                receiver=one.receiver.place,
                format=one.format.value,
                events=list(one.events),
                is_signed=bool(one.receiver.secret),
                sent_at=sent_at.isoformat() if sent_at else None,
                **row,
            )
        )
    return found
