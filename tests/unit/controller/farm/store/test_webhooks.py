"""Webhooks of a farm: settings, messages of events, delivery and retries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.farm_desks import ANNA, BROKEN, Desk
from support.schemas import check_document
from support.webhooks import WebhookReceiver, receive_webhooks

from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.database.notifications import PubSub
from hil.controller.farm.messages import JobResult
from hil.controller.farm.webhooks.outbox import list_webhooks, register_webhooks
from hil.controller.farm.webhooks.sender import WebhookSender
from hil.controller.farm.webhooks.webhook_settings import FarmWebhook, load_webhooks
from hil.controller.notify.delivery import MessageFormat, Webhook, sign_body
from hil.errors import DeliveryFailed, UsageError


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receive_webhooks() as one:
        yield one


def add_webhook(desk: Desk, receiver: WebhookReceiver, **settings: object) -> tuple[WebhookSender, FarmWebhook]:
    """Register a webhook, as a gateway does at its start."""
    webhook = FarmWebhook("ci", Webhook(receiver.url, "s3cret"), **settings)
    desk.do(register_webhooks, [webhook])
    return WebhookSender(desk.db, PubSub(), [webhook]), webhook


def test_webhook_receives_ended_jobs(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver)
    desk.online("a")
    [name] = desk.submit(who=ANNA)
    desk.report(desk.grant("a"), JobResult(1, "FAIL", "digits: wrong output"))
    assert desk.run(sender.send_pending(webhook)) == 1
    assert desk.run(sender.send_pending(webhook)) == 0
    [message] = receiver.messages
    document = message.document
    check_document(document, "webhook message", "farm")
    assert (document["event"], document["job"]["name"], document["job"]["boards"]) == ("job_ended", name, ["a"])
    assert (document["job"]["outcome"], document["job"]["exit_code"]) == ("FAIL", 1)
    assert document["text"] == f"job {name} of anna ended: FAIL, a job: digits: wrong output"
    assert message.headers["x-hil-signature-256"] == sign_body("s3cret", message.body)
    assert message.headers["x-hil-delivery"] == document["id"]


def test_webhook_receives_quarantine_once(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver, events=("board_quarantined",))
    desk.attend("a")
    for _ in range(2):
        desk.rows("update hil.boards set check_at = now() - interval '1 s'")
        desk.tick()
        desk.report(desk.grant("a"), JobResult(4, "BOARD_UNFIT", "no answer"))
    assert desk.board("a")["failures"] == 2
    desk.run(sender.send_pending(webhook))
    [document] = [message.document for message in receiver.messages]
    assert (document["event"], document["board"]) == ("board_quarantined", "a")
    assert "no answer" in document["text"]


def test_webhook_receives_lost_host(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver, events=("host_lost",), format=MessageFormat.SLACK)
    desk.online("a", host="lab1")
    desk.silence("a")
    desk.tick()
    desk.run(sender.send_pending(webhook))
    [message] = receiver.messages
    assert message.document["text"].startswith("host lab1 is lost: no heartbeat")
    assert message.document["blocks"][0]["text"]["type"] == "mrkdwn"


def test_webhook_gets_only_failed_jobs(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver, failed_only=True)
    desk.online("a")
    desk.submit(2)
    desk.report(desk.grant("a"))
    desk.report(desk.grant("a"), JobResult(1, "FAIL", "wrong"))
    desk.run(sender.send_pending(webhook))
    assert [message.document["job"]["outcome"] for message in receiver.messages] == ["FAIL"]


def test_failed_delivery_is_repeated_later(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver)
    desk.online("a")
    desk.submit()
    desk.report(desk.grant("a"))
    receiver.respond(503)
    assert desk.run(sender.send_pending(webhook)) == 1
    assert desk.run(sender.send_pending(webhook)) == 0
    [status] = desk.do(list_webhooks, [webhook])
    assert (status.waiting, status.sent, status.error) == (
        1,
        0,
        f"{webhook.receiver.place} rejected the message with status 503",
    )
    desk.rows("update hil.outbox set next_at = now()")
    desk.run(sender.send_pending(webhook))
    first, second = receiver.messages
    assert first.headers["x-hil-delivery"] == second.headers["x-hil-delivery"]
    [status] = desk.do(list_webhooks, [webhook])
    assert (status.waiting, status.sent, status.failed, status.error) == (0, 1, 0, "")


def test_rejected_delivery_is_given_up(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver)
    desk.online("a")
    desk.submit()
    desk.report(desk.grant("a"))
    receiver.respond(410)
    desk.run(sender.send_pending(webhook))
    [status] = desk.do(list_webhooks, [webhook])
    assert (status.waiting, status.failed) == (0, 1)


def test_two_gateways_send_a_message_once(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, webhook = add_webhook(desk, receiver)
    other = WebhookSender(desk.db, PubSub(), [webhook])
    desk.online("a")
    desk.submit(5)
    for _ in range(5):
        desk.report(desk.grant("a"))

    async def send_both() -> list[int]:
        return await asyncio.gather(sender.send_pending(webhook), other.send_pending(webhook))

    assert sum(desk.run(send_both())) == 5
    assert len({message.headers["x-hil-delivery"] for message in receiver.messages}) == len(receiver.messages) == 5


def test_slow_receiver_leaves_threads_of_gateway_free(
    desk: Desk, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, webhook = add_webhook(desk, receiver)
    desk.online("a")
    desk.submit()
    desk.report(desk.grant("a"))
    is_posting, may_end = threading.Event(), threading.Event()

    def post_slowly(*_: object, **__: object) -> None:
        is_posting.set()
        may_end.wait(60)

    async def use_other_thread() -> None:
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            sending = asyncio.create_task(sender.send_pending(webhook))
            while not is_posting.is_set():
                await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(asyncio.to_thread(lambda: None), 30)
            finally:
                may_end.set()
            assert await sending == 1

    monkeypatch.setattr("hil.controller.farm.webhooks.sender.post_message", post_slowly)
    desk.run(use_other_thread())


def test_error_of_one_task_ends_all_tasks(
    desk: Desk, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = add_webhook(desk, receiver)

    async def fail() -> None:
        raise DatabaseAway("the database is unavailable")

    async def run() -> set[asyncio.Task[Any]]:
        with pytest.raises(DatabaseAway):
            await sender.run()
        return asyncio.all_tasks() - {asyncio.current_task()}

    monkeypatch.setattr(sender, "_register", fail)
    before = desk.run(list_tasks())
    assert desk.run(run()) <= before


async def list_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks()


def test_events_without_webhooks_add_no_messages(desk: Desk) -> None:
    desk.online("a")
    desk.submit(max_attempts=1)
    desk.report(desk.grant("a"), BROKEN)
    assert desk.rows("select * from hil.outbox") == []


def test_test_message_reports_response(desk: Desk, receiver: WebhookReceiver) -> None:
    sender, _ = add_webhook(desk, receiver)
    assert desk.run(sender.send_test("ci")).status == 200
    assert receiver.messages[0].document["event"] == "test"
    receiver.respond(403)
    with pytest.raises(DeliveryFailed, match="status 403"):
        desk.run(sender.send_test("ci"))
    with pytest.raises(UsageError, match="webhook 'cii' not found") as failure:
        desk.run(sender.send_test("cii"))
    assert failure.value.hint == "did you mean 'ci'? known webhooks: ci"


def test_settings_read_webhooks(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(
        '[webhooks.ci]\nurl_env = "CI_URL"\nsecret = "s"\nevents = ["job_ended"]\nfailed_only = true\n'
        '[webhooks.chat]\nurl = "https://chat.example/x"\nformat = "slack"\n'
    )
    ci, chat = load_webhooks(path, {"CI_URL": "https://ci.example/hook"})
    assert (ci.receiver.place, ci.receiver.secret, ci.events) == ("https://ci.example", "s", ("job_ended",))
    assert (chat.format, chat.events, chat.failed_only) == (
        MessageFormat.SLACK,
        ("job_ended", "board_quarantined", "host_lost"),
        False,
    )
    assert "example" not in repr(ci)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing url"),
        ('url = "ftp://x/SECRET"', "invalid URL"),
        ('url = "https://x/"\nurl_env = "X"', "both url and url_env"),
        ('url_env = "GONE"', "the variable GONE of url_env is not set"),
        ('url = "https://x/"\nevents = ["jobs"]', "unknown event 'jobs'"),
        ('url = "https://x/"\nformat = "xml"', "unknown format 'xml'"),
        ('url = "https://x/"\nevent = []', "unknown setting 'event'"),
        ('url = "https://x/"\nfailed_only = 1', "failed_only must be true or false"),
    ],
)
def test_settings_refuse_invalid_webhook(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(f"[webhooks.ci]\n{text}\n")
    with pytest.raises(UsageError, match=message) as failure:
        load_webhooks(path, {})
    assert "SECRET" not in str(failure.value)
