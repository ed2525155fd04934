"""Receivers of messages: a webhook, or a repository on GitHub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from hil.controller.notify.delivery import (
    MAX_ATTEMPTS,
    MessageFormat,
    Webhook,
    check_webhook_url,
    deliver_message,
    encode_body,
)
from hil.controller.records.base import Record
from hil.controller.records.decisions.notification import NightMessage
from hil.controller.web.announce.messages import make_markdown, make_slack_body, make_title
from hil.core.digest import digest_of
from hil.errors import UsageError

Body = Record | Mapping[str, Any]
GITHUB_API = "https://api.github.com"
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}/[A-Za-z0-9._-]{1,100}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTEXT = "hil/night"
# Maximum characters of the description of a commit status.
_MAX_DESCRIPTION = 140


class Receiver(Protocol):
    """Receiver of messages."""

    @property
    def is_status(self) -> bool:
        """True if a message replaces earlier messages, so that it contains all causes, or none."""

    @property
    def name(self) -> str:
        """Name for people, without secrets."""

    @property
    def identity(self) -> str:
        """Digest that identifies the receiver in the file of announced causes."""

    def make_body(self, message: NightMessage) -> Body:
        """Return the body of a request."""

    def send(self, message: NightMessage, delivery: str) -> None:
        """Send a message. Raises DeliveryFailed."""


@dataclass(frozen=True)
class WebhookReceiver:
    """Webhook with JSON or Slack's format.

    Attributes:
        has_url: False if --dry-run shows messages without a URL.
    """

    webhook: Webhook
    format: MessageFormat
    has_url: bool = True
    is_status: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Scheme and host; "" without a URL."""
        return self.webhook.place if self.has_url else ""

    @property
    def identity(self) -> str:
        """Digest of format and URL."""
        return _shorten(f"{self.format.value} {self.webhook.url}")

    def make_body(self, message: NightMessage) -> Body:
        """Return the message in the format of the webhook."""
        return make_slack_body(message) if self.format is MessageFormat.SLACK else message

    def send(self, message: NightMessage, delivery: str) -> None:
        """Send a message, with retries."""
        body = encode_body(self.make_body(message))
        deliver_message(self.webhook, body, event=message.event, delivery=delivery)


@dataclass(frozen=True)
class GitHubReceiver:
    """Repository on GitHub: a new issue per message, a comment on an issue, or the status of a commit."""

    repository: str
    token: str = field(repr=False)
    issue: int = 0  # 0 opens issues
    commit: str = ""  # sets the status of this commit instead
    api: str = GITHUB_API

    @property
    def is_status(self) -> bool:
        """True for the status of a commit, which each message replaces."""
        return bool(self.commit)

    @property
    def name(self) -> str:
        """Owner and name."""
        return self.repository

    @property
    def identity(self) -> str:
        """Digest of the address."""
        return _shorten(self._url)

    @property
    def _url(self) -> str:
        start = f"{self.api.rstrip('/')}/repos/{self.repository}"
        if self.commit:
            return f"{start}/statuses/{self.commit}"
        return f"{start}/issues/{self.issue}/comments" if self.issue else f"{start}/issues"

    def make_body(self, message: NightMessage) -> Body:
        """Return the issue, the comment or the status."""
        title = make_title(message)
        if self.commit:
            status = {
                "state": "failure" if message.causes else "success",
                "context": _CONTEXT,
                "description": title[:_MAX_DESCRIPTION],
            }
            return {**status, **({"target_url": message.url} if message.url else {})}
        text = make_markdown(message)
        return {"body": text} if self.issue else {"title": title, "body": text}

    def send(self, message: NightMessage, delivery: str) -> None:
        """Send a message. Only a status is sent again after a temporary error."""
        headers = {"Accept": "application/vnd.github+json", "User-Agent": "hil", "X-GitHub-Api-Version": "2022-11-28"}
        webhook = Webhook(self._url, headers={**headers, "Authorization": f"Bearer {self.token}"})
        # A repeated request would open a second issue, so send once.
        attempts = MAX_ATTEMPTS if self.commit else 1
        deliver_message(webhook, encode_body(self.make_body(message)), attempts=attempts)


def make_webhook_receiver(
    format_name: str, environment: Mapping[str, str], *, dry_run: bool = False
) -> WebhookReceiver:
    """Return the receiver of the variable HIL_NOTIFY_URL. Raises UsageError if it is missing or invalid.

    Args:
        dry_run: whether the variable may be missing.
    """
    given = environment.get("HIL_NOTIFY_URL", "")
    if not given and not dry_run:
        hint = "set HIL_NOTIFY_URL to the URL of the webhook, or use --github OWNER/REPO"
        raise UsageError("no receiver of messages", hint=hint)
    url = given or "http://localhost"
    check_webhook_url(url, "HIL_NOTIFY_URL")
    webhook = Webhook(url, environment.get("HIL_NOTIFY_SECRET", ""))
    return WebhookReceiver(webhook, MessageFormat(format_name), has_url=bool(given))


def make_github_receiver(
    repository: str, issue: int, commit: str, environment: Mapping[str, str], *, dry_run: bool = False
) -> GitHubReceiver:
    """Return the receiver for a repository, with the token in GITHUB_TOKEN. Raises UsageError for invalid values."""
    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"invalid --github {repository[:100]!r}", hint="expected OWNER/REPO")
    if commit and not _COMMIT.fullmatch(commit):
        raise UsageError(f"invalid --commit {commit[:80]!r}", hint="expected 40 hexadecimal digits: git rev-parse HEAD")
    if commit and issue:
        raise UsageError("--issue and --commit are exclusive", hint="run hil notify once for each")
    token = environment.get("GITHUB_TOKEN", "")
    if not (token.strip() or dry_run):
        hint = "set GITHUB_TOKEN to a token that may write issues (or statuses, with --commit)"
        raise UsageError("--github needs a token", hint=hint)
    api = check_webhook_url(environment.get("GITHUB_API_URL") or GITHUB_API, "GITHUB_API_URL")
    return GitHubReceiver(repository, token.strip(), issue, commit, api)


def _shorten(text: str) -> str:
    return digest_of(text.encode()).rpartition(":")[2][:16]
