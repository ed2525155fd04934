"""Messages about causes: JSON, Slack and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hil.controller.notify.slack import build_slack_message, escape_slack, make_slack_link
from hil.controller.records.decisions.notification import NightMessage, NotifiedCause
from hil.controller.storage.screen.texts import format_count
from hil.controller.web.announce.news import NightNews
from hil.controller.workloads.suites.reports.summary import escape_text, format_markdown_table, format_name
from hil.core import own_version
from hil.core.text import escape_controls

_NAMED = 5
# GitHub accepts 65,536 characters in a comment, and 256 in a title.
_MAX_MARKDOWN, _MAX_TITLE = 60_000, 250
_MAX_CAUSES = 50


def make_messages(news: NightNews, causes: Sequence[NotifiedCause], *, is_digest: bool) -> list[NightMessage]:
    """Return a message per cause, or a digest of all causes. Without causes, there is no message."""
    if is_digest:
        return [make_digest(news, causes)] if causes else []
    return [
        NightMessage(event="cause", title=one.title, baseline=news.baseline, causes=[one], url=one.url or news.url)
        for one in causes
    ]


def make_digest(news: NightNews, causes: Sequence[NotifiedCause]) -> NightMessage:
    """Return a message with all causes, or without causes."""
    count = format_count(len(causes), "new cause") if causes else "no new causes"
    title = f"{count} since {news.baseline.kind} {news.baseline.value}"
    return NightMessage(event="digest", title=title, baseline=news.baseline, causes=list(causes), url=news.url)


def make_slack_body(message: NightMessage) -> dict[str, Any]:
    """Return the body for Slack."""
    return build_slack_message(f"hil: {message.title}", [*map(_make_section, message.causes)], link=message.url)


def _make_section(cause: NotifiedCause) -> str:
    title = make_slack_link(cause.url, cause.title) if cause.url else escape_slack(cause.title)
    owners = f"\nOwner: {escape_slack(', '.join(cause.owners))}" if cause.owners else ""
    return f"*{title}*\n{escape_slack(_list_names(cause))}, since {cause.date}{owners}"


def _list_names(cause: NotifiedCause) -> str:
    named = ", ".join(cause.names[:_NAMED])
    further = cause.cases - min(len(cause.names), _NAMED)
    return f"{named} and {further} more" if further > 0 else named


def _escape_markdown(text: str) -> str:
    """Escape a text so that it contains no markup and mentions no users."""
    return escape_text(text).replace("@", "@\u200b")


def _format_name(text: str) -> str:
    return format_name(text).replace("@", "@\u200b")


def make_title(message: NightMessage) -> str:
    """Return the title of an issue, and the description of a commit status."""
    text = escape_controls(" ".join(f"hil: {message.title}".split()))
    return text if len(text) <= _MAX_TITLE else f"{text[: _MAX_TITLE - 1]}…"


def make_markdown(message: NightMessage) -> str:
    """Return the body of an issue or a comment."""
    lines = [f"### {_escape_markdown(f'hil: {message.title}')}", ""]
    shown = message.causes[:_MAX_CAUSES]
    rows: list[list[str | int]] = [
        [
            f"[{_escape_markdown(one.title)}]({one.url})" if one.url else _escape_markdown(one.title),
            ", ".join(map(_format_name, one.names[:_NAMED])) + (", ..." if one.cases > _NAMED else ""),
            ", ".join(map(_format_name, filter(None, one.boards))),
            one.date,
            _escape_markdown(", ".join(one.owners)),
        ]
        for one in shown
    ]
    lines += format_markdown_table(["cause", "cases", "boards", "since", "owner"], rows)
    if len(message.causes) > len(shown):
        lines.append(f"\n... and {len(message.causes) - len(shown)} more causes")
    lines += ["", *(f"- {_escape_markdown(one.explanation)}" for one in shown[:1] if message.event == "cause")]
    seen = f"[hil web]({message.url})" if message.url else "`hil web`"
    lines += [
        "",
        f"Compared with {message.baseline.kind} {_format_name(message.baseline.value)}. Details: {seen}. "
        f"`hil notify` {own_version()}.",
    ]
    return "\n".join(lines)[:_MAX_MARKDOWN] + "\n"
