"""Test saving a page as one file: it includes all data and has no links to the server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

from hil.controller.web.files.inner import InnerResponse
from hil.controller.web.files.saving import make_single_file, needs_of

STYLE = InnerResponse(200, "text/css", b"p { color: red }")
SCRIPT = InnerResponse(200, "text/javascript", b'"use strict"; const end = "</script><!--";')
PICTURE = InnerResponse(200, "image/png", b"\x89PNG")


def page(body: str = "", head: str = "") -> str:
    head = f'<head>\n<meta charset="utf-8">{head}</head>'
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>'


def test_needs_of_lists_unique_resources_in_order():
    text = page(
        '<img src="/b.png" alt=""><img src="data:image/png;base64,xx"><img src="//evil/c.png"><img src="/b.png">'
        '<canvas data-src="/api/t?a=1&amp;b=2" data-src-error="/api/e"></canvas><p data-src=""></p>',
        '<link rel="stylesheet" href="/a.css"><link rel="icon" href="/i.svg"><script src="/a.js" defer></script>'
        '<script src="/static/vendor/htmx.min.js" defer></script>',
    )
    found = needs_of(text)
    assert list(found.assets) == ["/a.css", "/a.js"]
    assert list(found.images) == ["/b.png"]
    assert list(found.data) == ["/api/t?a=1&b=2", "/api/e"]


def test_saved_page_inlines_styles_and_scripts_with_policy():
    head = '<link rel="stylesheet" href="/a.css"><script src="/a.js" defer></script><script src="/htmx.js"></script>'
    made = make_single_file(page(head=head), {"/a.css": STYLE, "/a.js": SCRIPT})
    (style,), (script,) = re.findall("<style>(.*?)</style>", made), re.findall("<script>(.*?)</script>", made)
    assert style == STYLE.body.decode()
    assert script == r'"use strict"; const end = "\x3c/script>\x3c!--";'
    policy = html.unescape(re.findall('Content-Security-Policy" content="(.*?)"', made)[0])
    digests = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest())
        for kind, text in (("style", style), ("script", script))
    }
    assert policy.split("; ") == [
        "default-src 'none'",
        "img-src data:",
        *(f"{kind}-src 'sha256-{digest.decode()}'" for kind, digest in digests.items()),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert made.index("charset") < made.index("Content-Security-Policy") < made.index("<style>")
    # Deferred scripts run after the page is parsed.
    assert made.index("</head>") < made.index("<script>")
    assert "/a.css" not in made and "/a.js" not in made and "htmx" not in made


def test_saved_page_inlines_images_and_data_by_address():
    data = {"name": "</script><b>&", "values": [1.5]}
    text = page('<img alt="x" src="/p.png"><div data-src="/api/d?a=1&amp;b=2" data-src-raw="/api/raw"></div>')
    raw = InnerResponse(200, "application/octet-stream", b"\0\1\2")
    json_answer = InnerResponse(200, "application/json", json.dumps(data).encode())
    made = make_single_file(text, {"/p.png": PICTURE, "/api/d?a=1&b=2": json_answer, "/api/raw": raw})
    assert f'<img alt="x" src="data:image/png;base64,{base64.b64encode(PICTURE.body).decode()}">' in made
    (held,) = re.findall('<script type="application/json" data-url="/api/d\\?a=1&amp;b=2">(.*?)</script>', made)
    assert json.loads(held) == data and "<" not in held
    assert f'data-url="/api/raw">{base64.b64encode(raw.body).decode()}</script>' in made


def test_saved_page_notes_missing_resources():
    text = page('<!-- what was left out --><img alt="the difference" src="/p.png"><p data-src="/api/d"></p>')
    made = make_single_file(text, {}, ["2 <were> left out"])
    assert '<ul class="note"><li>2 &lt;were&gt; left out</li></ul>' in made
    assert '<img alt="the difference">' in made and "data-url" not in made
    assert "left out" not in make_single_file(text, {})


def test_saved_page_removes_links_to_server():
    text = page(
        '<a href="/session?id=a" hx-get="/x">one</a><a href="#main">two</a><a href="https://example.org/">three</a>'
        '<a href="javascript:alert(1)">four</a><form action="/" method="get"><input name="q"><button>go</button></form>'
        '<input type="range"><div data-live="/x">now</div><iframe src="/perfetto/"><p>inner</p></iframe><p>after</p>'
    )
    made = make_single_file(text, {})
    assert '<a>one</a><a href="#main">two</a><a href="https://example.org/">three</a><a>four</a>' in made
    assert '<form><input name="q" disabled><button disabled>go</button></form><input type="range">' in made
    assert "<div>now</div>" in made and "inner" not in made and "<p>after</p>" in made
    assert '<html lang="en" data-saved>' in made


def test_saved_page_preserves_other_markup():
    body = '<p title="a &quot;b&quot; &lt;c&gt;" CLASS=x>1 &lt; 2 &amp;&#x27; ü<br>'
    body += '<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>'
    assert body in make_single_file(page(body), {})
    # Model names and board messages remain escaped text.
    hostile = html.escape("</p><script>alert(1)</script><img src=x onerror=alert(1)>")
    assert hostile in make_single_file(page(f"<p>{hostile}</p>"), {})
    attribute = f'<a title="{hostile}" href="/x">'
    assert f'<a title="{hostile}">' in make_single_file(page(attribute), {})
