"""`hil farm webhooks`: receivers of the farm's events."""

from __future__ import annotations

import click

from hil.controller.cli.commands import group
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.farm.tables import WEBHOOKS, make_table, show
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.controller.records.commands.farm import WebhookList
from hil.controller.records.lab.webhooks import TestedWebhook, WebhookStatus

# The gateway waits this long for the receiver, and some seconds for the database.
_LIMIT_SECONDS = 30.0


@group(epilog="Example: hil farm webhooks test ci")
def webhooks() -> None:
    """List and test the webhooks of the gateway.

    Tables [webhooks.NAME] in the gateway's farm.toml configure them (docs/farm-webhooks.md).
    """


@webhooks.command("list", epilog="Example: hil farm webhooks list --json")
@json_option
def list_webhooks(as_json: bool) -> None:
    """List the webhooks with their events and the numbers of messages."""
    with connect_farm() as farm:
        rows: list[WebhookStatus] = farm.ask("webhooks")
    answer(as_json, WebhookList(webhooks=rows), show=lambda: show(make_table(WEBHOOKS, rows)))


@webhooks.command(epilog="Example: hil farm webhooks test ci")
@click.argument("name")
@json_option
def test(name: str, as_json: bool) -> None:
    """Send a test message to the webhook NAME now, and show the response."""
    with connect_farm() as farm:
        done: TestedWebhook = farm.do("webhook", name=name, limit_s=_LIMIT_SECONDS)
    answer(as_json, done, f"webhook {done.webhook} accepted the message with status {done.status}")
