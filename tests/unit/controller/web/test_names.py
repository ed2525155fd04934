"""Test file names with invalid or hidden characters: they are indexed, shown escaped, and linked correctly."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.web import asking, write_record, write_run, write_suite

from hil.controller.web.text.names import escape_name, quote_command, unescape_name

_NAMES = st.binary(min_size=1, max_size=40).map(lambda one: os.fsdecode(one.replace(b"\0", b".")))


@given(_NAMES)
@example("a\\x80")
@example("\\\\x80\\")
@example("\u202egnp.exe")
def test_escaped_name_decodes_to_original(name: str) -> None:
    text = escape_name(name)
    assert unescape_name(text) == name and text.isprintable()
    assert text == name or not name.isprintable() or "\\" in name


@given(_NAMES, _NAMES)
def test_escaped_names_are_unique(one: str, other: str) -> None:
    assert (escape_name(one) == escape_name(other)) == (one == other)


def test_command_text_quotes_unprintable_names(tmp_path: Path) -> None:
    for name in (b"\xff'\n\\", b"\x1b[31m", b"plain", b"a b"):
        path = tmp_path / os.fsdecode(name)
        path.write_text("here")
        command = quote_command(["cat", str(path)])
        assert command.isprintable()
        assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout == "here"
    assert quote_command(["cat", "a b"]) == shlex.join(["cat", "a b"])


@pytest.mark.ci
def test_pages_link_sessions_and_files_with_any_name(tmp_path: Path) -> None:
    chance = random.Random(7)
    raw = [b"\xff", b"\x1b[31mred", b"a\\x80", b"a\x80", b"line\nend", b"\xe2\x80\xaegnp", b"%2e?&#\"'<b>"]
    raw += [bytes(chance.choice(range(1, 256)) for _ in range(12)).replace(b"/", b"_") for _ in range(5)]
    names = [os.fsdecode(one if one[:1] != b"." else b"_" + one) for one in raw]
    for name in names:
        folder = write_suite(tmp_path, name, [{"id": "case", "outcome": "FAIL", "folder": "kept"}])
        for kind in ("outputs", "references"):
            (folder / "kept" / kind).mkdir(parents=True)
            np.save(folder / "kept" / kind / f"0-{name[:20]}.npy", np.ones(3, np.float32))
        (folder / "kept" / "logs").mkdir()
        (folder / "kept" / "logs" / f"{name}.log").write_text("the log of it")
        (folder / "kept" / f"{name}.mlir").write_text("the IR of it")
        (folder / f"{name}.md").write_text("the report of it")
    matrix = tmp_path / os.fsdecode(b"matrix \xff")
    write_record(matrix / "matrix.json", {"schema": 1, "targets": [{"name": "x"}]})
    write_run(matrix, "x", [{}])
    with asking(tmp_path) as client:

        def links(address: str, pattern: str) -> list[str]:
            answer = client.get(address)
            assert answer.status_code == 200, answer.text
            assert all(one.isprintable() or one == "\n" for one in answer.text)
            return list(dict.fromkeys(unescape(one) for one in re.findall(rf'href="(/{pattern}[^"]*)"', answer.text)))

        found = links("/", r"session\?id=")
        assert len(found) == len(names) + 2
        shown = unescape(client.get("/").text)
        assert all(escape_name(name) in shown for name in names)
        assert "/session?id=matrix+%5Cxff%2Fx" in links("/session?id=matrix+%5Cxff", r"session\?")
        assert "/session?id=matrix+%5Cxff" in links("/session?id=matrix+%5Cxff%2Fx", r"session\?")
        for session in [one for one in found if "matrix" not in one]:
            (report,) = [one for one in links(session, r"file\?") if one.endswith(".md")]
            assert client.get(report).text == "the report of it"
            (case,) = links(session, r"case\?")
            (log,), (ir,) = links(case, r"log\?"), links(case, r"file\?")
            assert client.get(log).text == "the log of it" and client.get(ir).text == "the IR of it"
            assert "map-difference" in client.get(links(case, r"tensors\?")[0]).text
            assert client.get("/share", params={"page": session}).status_code == 200
