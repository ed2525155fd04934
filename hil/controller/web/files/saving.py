"""Save a page as a single HTML file with embedded styles, scripts, pictures and data.

A browser that opens the file sends no requests.

In the file, links to the server are plain text, forms are disabled, and there are no live updates. The file's content
security policy allows only the embedded scripts and styles, by digest, and forbids all requests.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

from hil.controller.web.files.inner import InnerResponse, is_ours
from hil.controller.workloads.suites.reports.page import digest_page_part
from hil.core.cancellation import check_cancelled

# Comment in base.html. Saving replaces the comment with notes about omitted parts.
NOTES = "what was left out"
# Scripts that need a connection to the server.
_LIVE_SCRIPTS = ("htmx",)
_FIELDS = ("input", "select", "textarea", "button")
_VOID = re.compile(r"^(hx-|data-live|srcset$|ping$|target$|download$)")
_ELSEWHERE = re.compile(r"^(https?:|mailto:)", re.IGNORECASE)
_NONE = "'none'"
_Attributes = Sequence[tuple[str, "str | None"]]


@dataclass
class PageResources:
    """Unique URLs in a page's HTML, in order."""

    assets: dict[str, None] = field(default_factory=dict)  # styles and scripts, which are required
    images: dict[str, None] = field(default_factory=dict)
    data: dict[str, None] = field(default_factory=dict)


def needs_of(page: str) -> PageResources:
    """Return the resources that a page fetches when it is opened."""
    finder = _ResourceFinder()
    finder.feed(page)
    finder.close()
    return finder.found


def make_single_file(page: str, held: Mapping[str, InnerResponse], notes: Sequence[str] = ()) -> str:
    """Return the page as a single file.

    Args:
        held: URL -> response, for the URLs from :func:`needs_of`. The page omits missing resources.
        notes: sentences about omitted parts, for the head of the page.
    """
    writer = _PageWriter(page, held, notes)
    writer.feed(page)
    writer.close()
    return writer.text()


class _ResourceFinder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found = PageResources()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        check_cancelled()
        given = dict(attrs)
        if address := _find_asset_url(tag, given):
            self.found.assets[address] = None
        elif tag == "img" and is_ours(given.get("src") or ""):
            self.found.images[str(given["src"])] = None
        for address in _list_data_urls(attrs):
            self.found.data[address] = None


def _find_asset_url(tag: str, given: Mapping[str, str | None]) -> str:
    """Return the URL of a style or script to embed, or "" for other elements."""
    if tag == "link" and given.get("rel") == "stylesheet":
        return given.get("href") or ""
    if tag == "script" and not any(name in (given.get("src") or "").rpartition("/")[2] for name in _LIVE_SCRIPTS):
        return given.get("src") or ""
    return ""


def _list_data_urls(attrs: _Attributes) -> Iterator[str]:
    return (value for name, value in attrs if name.startswith("data-src") and value and is_ours(value))


class _PageWriter(HTMLParser):
    """Parser that writes the page with the changes for a saved file. All other text stays unchanged."""

    def __init__(self, page: str, held: Mapping[str, InnerResponse], notes: Sequence[str]) -> None:
        super().__init__(convert_charrefs=False)
        self._held = held
        self._notes = notes
        self._data = needs_of(page).data
        self._written: list[str] = []
        self._head = 0  # position of the policy in the output
        self._styles: list[str] = []
        self._scripts: list[str] = []
        self._skipping = ""  # element that is omitted with its content
        self._form = False  # True inside a form that the server handles

    def text(self) -> str:
        """Return the output with its content security policy."""
        allowed = "; ".join(
            f"{kind}-src {' '.join(map(digest_page_part, texts)) or _NONE}"
            for kind, texts in (("style", self._styles), ("script", self._scripts))
        )
        policy = f"default-src 'none'; img-src data:; {allowed}; base-uri 'none'; form-action 'none'"
        meta = f'\n<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=False)}">'
        return "".join((*self._written[: self._head], meta, *self._written[self._head :]))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        check_cancelled()
        given = dict(attrs)
        if self._skipping:
            return
        if tag in ("iframe", "object", "embed"):
            self._skipping = tag if tag != "embed" else ""
            self._written.append('<p class="note">This file omits a part that requires the server.</p>')
        elif tag == "script":
            self._skipping = tag
            if address := _find_asset_url(tag, given):
                self._scripts.append(_escape_script(self._embed_text(address)))
        elif tag == "link":
            if address := _find_asset_url(tag, given):
                self._styles.append(self._embed_text(address))
                self._written.append(f"<style>{self._styles[-1]}</style>")
        elif tag != "meta" or given.get("name") != "htmx-config":
            self._form = self._form or (tag == "form" and "action" in given)
            self._write_start_tag(tag, attrs)
            # The encoding must be in the first 1024 bytes, and the policy must precede the content. So write the policy
            # right after the encoding.
            if "charset" in given or tag == "head":
                self._head = len(self._written)

    def _write_start_tag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kept = [
            (name, value)
            for name, value in attrs
            if not _VOID.match(name) and self._is_kept_attribute(tag, name, value)
        ]
        if tag == "html":
            kept.append(("data-saved", None))
        elif tag == "img":
            kept += [("src", one) for one in [self._find_picture_url(dict(attrs).get("src") or "")] if one]
        elif tag in _FIELDS and self._form:
            kept.append(("disabled", None))
        if kept == attrs:
            self._written.append(self.get_starttag_text() or "")
            return
        texts = (name if value is None else f'{name}="{html.escape(value)}"' for name, value in kept)
        self._written.append(f"<{' '.join((tag, *texts))}>")

    @staticmethod
    def _is_kept_attribute(tag: str, name: str, value: str | None) -> bool:
        """Return True if an attribute does not need the server."""
        if name in ("href", "xlink:href"):
            return bool(value) and (str(value).startswith("#") or (tag == "a" and bool(_ELSEWHERE.match(str(value)))))
        return name not in ("action", "formaction", "src", "poster", "background") and not (
            tag == "form" and name == "method"
        )

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Keep "<path/>" in SVG. HTML ignores the slash in other elements.
        before = len(self._written)
        self.handle_starttag(tag, attrs)
        if tag not in ("link", "meta", "img", "input", "br", "hr") and len(self._written) > before:
            closed = self._written[-1]
            self._written[-1] = closed if closed.endswith("/>") else f"{closed[:-1]}/>"
        if self._skipping == tag:
            self._skipping = ""

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            if tag == self._skipping:
                self._skipping = ""
            return
        if tag == "form":
            self._form = False
        if tag == "body":
            self._written += self._embed_data()
            self._written += [f"<script>{script}</script>\n" for script in self._scripts]
        self._written.append(f"</{tag}>")

    def _embed_data(self) -> Iterator[str]:
        for address in self._data:
            if answer := self._held.get(address):
                name = html.escape(address)
                if answer.type == "application/json":
                    text = answer.body.decode("utf-8", "replace").replace("<", "\\u003c")
                    yield f'<script type="application/json" data-url="{name}">{text}</script>\n'
                else:
                    text = base64.b64encode(answer.body).decode()
                    kind = html.escape(answer.type)
                    yield f'<script type="text/plain" data-type="{kind}" data-url="{name}">{text}</script>\n'

    def _embed_text(self, address: str) -> str:
        answer = self._held.get(address)
        return "" if answer is None else answer.body.decode("utf-8", "replace")

    def _find_picture_url(self, address: str) -> str:
        if address.startswith("data:"):
            return address
        answer = self._held.get(address)
        return "" if answer is None else f"data:{answer.type};base64,{base64.b64encode(answer.body).decode()}"

    def handle_comment(self, data: str) -> None:
        if data.strip() == NOTES and self._notes:
            items = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes)
            self._written.append(f'<ul class="note">{items}</ul>')

    def _write_text(self, text: str) -> None:
        if not self._skipping:
            self._written.append(text)

    def handle_data(self, data: str) -> None:
        self._write_text(data)

    def handle_entityref(self, name: str) -> None:
        self._write_text(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._write_text(f"&#{name};")

    def handle_decl(self, decl: str) -> None:
        self._write_text(f"<!{decl}>")


def _escape_script(text: str) -> str:
    """Escape a script for HTML. "</script" and "<!--" only occur in strings and regular expressions."""
    return re.sub(r"<(/script|!--)", r"\\x3c\1", text, flags=re.IGNORECASE)
