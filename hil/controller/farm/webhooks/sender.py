"""Deliver the messages of the outbox to webhooks. Every gateway with webhooks in its settings runs this task.

Deliveries run in threads with a time limit, so a slow receiver blocks neither the gateway nor other webhooks.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from typing import Any

from hil.controller.farm.database.database import Database, Tx, end_tasks
from hil.controller.farm.database.notifications import PubSub, drain_queue
from hil.controller.farm.store import queries
from hil.controller.farm.webhooks.outbox import (
    MAX_ATTEMPTS,
    OutboxMessage,
    claim_message,
    mark_failed,
    mark_sent,
    register_webhooks,
)
from hil.controller.farm.webhooks.webhook_settings import BOARD_QUARANTINED, HOST_LOST, JOB_ENDED, FarmWebhook
from hil.controller.notify.delivery import MessageFormat, compute_backoff, encode_body, post_message
from hil.controller.notify.slack import build_slack_message
from hil.controller.records.lab.farm import FarmJob
from hil.controller.records.lab.webhooks import TestedWebhook, WebhookJob, WebhookMessage
from hil.core.bounded_http import HttpResponse
from hil.errors import DeliveryFailed, UsageError, did_you_mean

_LOG = logging.getLogger("hil.farm.gateway")
# Poll interval, in case a notification is lost or a repeated attempt is due.
_LOOK_S = 2.0
_REGISTER_S = 60.0
_COPIED = ("name", "title", "kind", "user", "project", "state", "outcome", "exit_code", "reason", "queued_at")


class WebhookSender:
    """Sender of a gateway's webhooks."""

    def __init__(self, db: Database, pubsub: PubSub, webhooks: Sequence[FarmWebhook]) -> None:
        self._db, self._pubsub, self.webhooks = db, pubsub, tuple(webhooks)
        # Slow receivers must not occupy the threads that the gateway uses for files and logins.
        self._threads = ThreadPoolExecutor(len(self.webhooks) + 1, "webhook")

    async def run(self) -> None:
        """Task: deliver messages. An error of one webhook does not delay the others."""
        tasks = [asyncio.create_task(one) for one in (self._register(), *map(self._serve_webhook, self.webhooks))]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After an error of one task, the gateway starts this method again.
            await end_tasks(*tasks)

    async def _register(self) -> None:
        while True:
            async with self._db.transaction() as tx:
                await register_webhooks(tx, self.webhooks)
            await asyncio.sleep(_REGISTER_S)

    async def send_pending(self, webhook: FarmWebhook) -> int:
        """Deliver the messages of a webhook that are due. Returns their number."""
        count = 0
        while True:
            async with self._db.transaction() as tx:
                message = await claim_message(tx, webhook.name)
                body = await _build_body(tx, webhook, message) if message is not None else b""
            if message is None:
                return count
            count += 1
            await self._deliver(webhook, message, body)

    async def send_test(self, name: str) -> TestedWebhook:
        """Send a test message now. Raises UsageError for an unknown webhook, and DeliveryFailed."""
        known = {one.name: one for one in self.webhooks}
        if name not in known:
            hint = did_you_mean(name, known) + (f"known webhooks: {', '.join(known)}" if known else _NO_WEBHOOKS)
            raise UsageError(f"webhook {name[:100]!r} not found", hint=hint)
        webhook, key = known[name], str(uuid.uuid4())
        at = datetime.now(timezone.utc).isoformat()
        text = f"test of webhook {name}"
        message = WebhookMessage(id=key, event="test", at=at, text=text, reason="hil farm webhooks test")
        body = _format_message(webhook, message)
        response = await self._post(webhook, body, "test", key)
        return TestedWebhook(webhook=name, status=response.status)

    async def _serve_webhook(self, webhook: FarmWebhook) -> None:
        with self._pubsub.subscribe() as queue:
            while True:
                await self.send_pending(webhook)
                deadline = time.monotonic() + _LOOK_S
                while (left := deadline - time.monotonic()) > 0:
                    changes = await drain_queue(queue, left)
                    if any(change["kind"] in ("webhook", "again") for change in changes):
                        break

    async def _post(self, webhook: FarmWebhook, body: bytes, event: str, delivery: str) -> HttpResponse:
        post = partial(post_message, webhook.receiver, body, event=event, delivery=delivery)
        return await asyncio.get_running_loop().run_in_executor(self._threads, post)

    async def _deliver(self, webhook: FarmWebhook, message: OutboxMessage, body: bytes) -> None:
        fields = {"webhook": webhook.name, "event": message.event, "attempt": message.attempts}
        try:
            if body:
                await self._post(webhook, body, message.event, message.key)
        except DeliveryFailed as error:
            is_last = error.is_permanent or message.attempts >= MAX_ATTEMPTS
            retry_s = None if is_last else max(compute_backoff(message.attempts), error.retry_after_s)
            _LOG.warning("webhook.failed", extra={**fields, "reason": error.message, "retry_s": retry_s})
            async with self._db.transaction() as tx:
                await mark_failed(tx, message.id, error.message, retry_s)
            return
        async with self._db.transaction() as tx:
            await mark_sent(tx, message.id)
        if body:
            _LOG.info("webhook.sent", extra=fields)


_NO_WEBHOOKS = "add a table [webhooks.NAME] to the gateway's farm.toml"


async def _build_body(tx: Tx, webhook: FarmWebhook, message: OutboxMessage) -> bytes:
    """Return the body of a message; empty if the webhook does not want the message."""
    fields: dict[str, Any] = {
        "id": message.key,
        "event": message.event,
        "at": message.at.isoformat(),
        "reason": message.reason,
    }
    if message.event == BOARD_QUARANTINED:
        text = f"board {message.board} is quarantined: {message.reason}"
        return _format_message(webhook, WebhookMessage(**fields, text=text, board=message.board))
    if message.event == HOST_LOST:
        text = f"host {message.host} is lost: {message.reason}"
        return _format_message(webhook, WebhookMessage(**fields, text=text, host=message.host))
    assert message.event == JOB_ENDED
    try:
        job = await queries.job(tx, message.job)
    except UsageError:
        return b""  # deleted in the meantime
    if webhook.failed_only and not job.exit_code:
        return b""
    result = job.outcome or job.state
    reason = f": {job.reason}" if job.reason else ""
    text = f"job {job.name} of {job.user} ended: {result}, {job.title}{reason}"
    return _format_message(webhook, WebhookMessage(**fields, text=text, job=_describe_job(job)))


def _describe_job(job: FarmJob) -> WebhookJob:
    boards = job.boards or ([job.board] if job.board else [])
    same = {name: getattr(job, name) for name in (*_COPIED, "started_at", "finished_at")}
    return WebhookJob(**same, boards=boards)


def _format_message(webhook: FarmWebhook, message: WebhookMessage) -> bytes:
    if webhook.format is MessageFormat.JSON:
        return encode_body(message)
    fields = {"Event": message.event, "Time": message.at}
    if isinstance(message.job, WebhookJob):
        fields |= {"Job": message.job.name, "User": message.job.user, "Boards": ", ".join(message.job.boards) or "none"}
    return encode_body(build_slack_message(message.text, fields=fields))
