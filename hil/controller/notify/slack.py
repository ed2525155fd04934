"""Messages for Slack's incoming webhooks, which Mattermost, Rocket.Chat and Discord (``/slack``) also accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hil.core.text import escape_controls

# Slack's limits: characters of a section, fields of a section, blocks of a message.
_MAX_SECTION = 3000
_MAX_FIELD = 2000
_MAX_FIELDS = 10
_MAX_BLOCKS = 50


def escape_slack(text: str) -> str:
    """Return the text with Slack's special characters escaped, so that it cannot contain links or mentions."""
    text = escape_controls(text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def make_slack_link(url: str, text: str) -> str:
    """Return a link in Slack's markup."""
    return f"<{escape_slack(url).replace('|', '%7C')}|{escape_slack(text).replace('|', '/')}>"


def build_slack_message(
    title: str, sections: Sequence[str] = (), *, fields: Mapping[str, str] | None = None, link: str = ""
) -> dict[str, Any]:
    """Return the body of a message.

    Args:
        title: first line, which notifications show; plain text.
        sections: paragraphs in Slack's markup. Escape values with :func:`escape_slack`.
        fields: name -> value, both plain text, shown in two columns.
        link: URL of a page with details.
    """
    head = f"*{escape_slack(title)}*" if not link else f"*{make_slack_link(link, title)}*"
    blocks: list[dict[str, Any]] = [_make_section(head)]
    if fields:
        shown = [f"*{escape_slack(name)}*\n{escape_slack(value)}"[:_MAX_FIELD] for name, value in fields.items()]
        for begin in range(0, len(shown), _MAX_FIELDS):
            texts = [{"type": "mrkdwn", "text": text} for text in shown[begin : begin + _MAX_FIELDS]]
            blocks.append({"type": "section", "fields": texts})
    blocks += [_make_section(text) for text in sections if text]
    if len(blocks) > _MAX_BLOCKS:
        left_out = len(blocks) - _MAX_BLOCKS + 1
        blocks = [*blocks[: _MAX_BLOCKS - 1], _make_section(f"{left_out} more paragraphs")]
    return {"text": escape_slack(title)[:_MAX_SECTION], "blocks": blocks}


def _make_section(text: str) -> dict[str, Any]:
    shown = text if len(text) <= _MAX_SECTION else text[: _MAX_SECTION - 1] + "…"
    return {"type": "section", "text": {"type": "mrkdwn", "text": shown}}
