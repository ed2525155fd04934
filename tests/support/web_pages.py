"""Parse pages of `hil web` as a browser does: their elements and their links."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from urllib.parse import parse_qsl, urlsplit

from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from hil.controller.web.server.app import PAGES
from hil.core.text import escape_controls

# Responses that never end, and large files from other projects.
STREAMS = ("/events", "/farm/events", "/job/log", "/perfetto/")
# Attributes whose text is visible or read aloud.
_LONGEST = 30_000
_SHOWN = ("title", "alt", "aria-label", "placeholder", "label", "summary")
_LEADING = ("href", "src", "action", "formaction", "hx-get", "hx-post", "data-live", "xlink:href", "poster")
# Pictures inside a page: PNG, and the color fields of a legend.
_PICTURE = re.compile(
    r"data:image/png;base64,[A-Za-z0-9+/=]*|data:image/svg\+xml,<svg xmlns='http://www\.w3\.org/2000/svg' "
    r"width='12' height='12'><rect width='12' height='12' fill='%23[0-9a-f]{6}'/></svg>"
)
_JINJA = re.compile(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}", re.S)


class PageParts(HTMLParser):
    """Parsed page: its elements with their attributes, its text, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.pairs: set[tuple[str, str]] = set()
        self.links: list[str] = []
        self.shown: list[str] = []
        self.comments: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.pairs |= {(tag, ""), *((tag, name) for name, _ in attrs)}
        for name, value in attrs:
            if name in _LEADING or name.startswith("data-src"):
                self.links.append(value or "")
            if name in _SHOWN:
                self.shown.append(value or "")

    def handle_data(self, data: str) -> None:
        self.shown.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def of_templates() -> set[tuple[str, str]]:
    """Return the elements of the templates, each with its attributes."""
    folder = resources.files("hil.controller.web").joinpath("templates")
    pairs: set[tuple[str, str]] = set()
    for file in folder.iterdir():
        pairs |= PageParts(_JINJA.sub(_kept, file.read_text())).pairs
    pairs = {(tag, name) for tag, name in pairs if re.fullmatch("(?!on|style)[a-z0-9-]*", name)}
    return pairs | {(tag, name) for tag, _ in pairs for name in ("class", "id", "data-saved")}


def _kept(found: re.Match[str]) -> str:
    """Return the attribute names that the code of a template can insert."""
    return (
        " ".join(re.findall(r"""[\w-]+=\\?["'][^"']*["']|(?<=[ "'])(?:selected|checked|disabled|open)\b""", found[0]))
        + " "
    )


# A page that is saved as one file contains its styles and scripts, and its input fields are disabled.
_SAVED = {(tag, "disabled") for tag in ("button", "input", "select", "textarea", "fieldset")}
_SAVED |= {("style", ""), ("meta", "http-equiv"), *(("script", name) for name in ("type", "data-url", "data-type"))}


def check_page(text: str, allowed: set[tuple[str, str]], where: str) -> PageParts:
    """Assert that a page has only elements of the templates and hides nothing. Return its parts."""
    parts = PageParts(text)
    if where.startswith("/share"):
        allowed = allowed | _SAVED
        parts.shown = []
        parts.links = []
    strange = parts.pairs - allowed
    assert not strange, (where, strange)
    assert not parts.comments, (where, parts.comments)
    for one in parts.shown:
        hidden = [found for found in (escape_controls(one),) if found != one]
        assert not hidden, (where, hidden[0][:200])
    for link in parts.links:
        if _PICTURE.fullmatch(link):
            continue
        scheme = urlsplit(link).scheme
        assert not scheme and not link.startswith("//") and (not link or link[0] in "/#?"), (where, link)
    return parts


class Crawl:
    """Follow all links of pages. Visit each kind of page once per session."""

    def __init__(self, client: TestClient, *, most: int = 300) -> None:
        self._client = client
        self._most = most
        self._seen: set[tuple[str, ...]] = set()
        self._waiting: deque[str] = deque()
        self.failures: list[str] = []
        self.visited: list[str] = []

    def start(self, *addresses: str) -> None:
        """Add addresses."""
        for address in addresses:
            parts = urlsplit(address)
            query = dict(parse_qsl(parts.query))
            # Visit only one of several pages that differ only in a filter or an order.
            key = (parts.path, *sorted(query), query.get("id", ""), query.get("case", ""))
            if len(address) > _LONGEST:
                continue  # The server refuses this address.
            if parts.path and not parts.path.startswith(STREAMS) and key not in self._seen:
                self._seen.add(key)
                self._waiting.append(address)

    def pages(self) -> Iterator[tuple[str, str]]:
        """Yield the address and the text of each HTML page. Other responses are only checked for errors."""
        while self._waiting and len(self.visited) < self._most:
            address = self._waiting.popleft()
            self.visited.append(address)
            answer = self._client.get(address, follow_redirects=False)
            if answer.status_code >= 500:
                self.failures.append(f"{answer.status_code} {address}")
            kind = answer.headers.get("content-type", "")
            if kind.startswith("text/html") and "/static/" not in address:
                self.start(*(link for link in PageParts(answer.text).links if link.startswith("/")))
                yield address, answer.text


def routes() -> list[str]:
    """Return the paths of all pages for GET requests, without endless responses and paths with a name."""
    found = [route for page in PAGES for route in page.router.routes if isinstance(route, APIRoute)]
    paths = [route.path for route in found if "GET" in (route.methods or ())]
    return [path for path in paths if not path.startswith(STREAMS) and "{" not in path]
