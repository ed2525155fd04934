"""Stored sessions with hostile records: each text is markup, reverses the text direction, or is extremely long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from support.web import write_record

PAYLOADS = {
    "script": "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>",
    "quotes": "\"'`><svg/onload=window.hacked=1><a href=\"javascript:window.hacked=1\" style='x:expression(1)'>",
    "attribute": "' autofocus onfocus=window.hacked=1 x='\" autofocus onfocus=window.hacked=1 x=\"",
    "template": "{{ 7 * 7 }}{% include 'base.html' %}${7*7}<%= 7 %>",
    "ends": "</script></textarea></title></style></select></pre>--><!-- ]]><iframe src=//evil.example>",
    "address": "javascript:window.hacked=1//http://evil.example/?a=b&token=x#y%00%2e%2e/..;/%",
    "path": "../../../../etc/passwd",
    "turned": "\u202egnp.exe\u2066\u200f\u061c",
    "controls": "a\0b\x1b[31m\x07\r\nc\td\x7f\x9b\u2028\u2029",
    "half": "\ud800 half \udfff",
    "long": "<b>" * 4_000,
    "formula": "=cmd|' /C calc'!A0\n@SUM(1)\n+1\n-1",
    "prototype": "__proto__",
    "search": 'NEAR("a" OR *) AND "',
    "empty": "",
}
# Unchanged fields, so that the session is found: names of its own files, and fields with its kind.
_KEPT = ("file", "folder", "digest", "dtype", "reference_dtype")


def records() -> dict[str, Any]:
    """Return a record of each kind, as hil writes it."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("web_records.json").read_text())
    return found


def all_texts(value: Any, change: Callable[[str], str], key: str = "", *, keys: bool = False) -> Any:
    """Return a record with all of its texts replaced; with ``keys``, also the keys of its objects."""
    if isinstance(value, dict):
        return {
            (change(name) if keys else name): all_texts(one, change, name, keys=keys) for name, one in value.items()
        }
    if isinstance(value, list):
        return [all_texts(one, change, key, keys=keys) for one in value]
    return change(value) if isinstance(value, str) and key not in _KEPT else value


def write_sessions(root: Path, documents: dict[str, Any], name: str = "") -> None:
    """Write a directory for each kind of session, with the other files that pages read."""
    run = root / f"run{name}"
    write_record(run / "run.json", documents["run"])
    for one in _entries(documents["run"]):
        _tensor(run, one)
    write_record(root / f"suite{name}" / "suite.json", documents["suite"])
    lines = json.dumps(documents["line"]) + "\n{damaged\n" + json.dumps({**documents["line"], "id": "another"}) + "\n"
    (root / f"suite{name}" / "results.jsonl").write_text(lines)
    write_record(root / f"bench{name}" / "bench.json", documents["bench"])
    write_record(root / f"bench{name}" / "run.json", documents["run"])
    for kind in ("bisect", "study", "matrix"):
        write_record(root / f"{kind}{name}" / f"{kind}.json", documents[kind])
    write_record(root / f"matrix{name}" / "a" / "run.json", documents["run"])
    write_record(root / f"trace{name}" / "trace.json", documents["trace"])
    write_record(root / f"trace{name}" / "comparison.json", documents["comparison"])
    write_record(root / f"trace{name}" / "call_0" / "call.json", documents["call"])
    write_record(root / f"profile{name}" / "profile.json", documents["profile"])


def _entries(value: Any) -> Iterator[Any]:
    """Return all fields of a record that contain file names."""
    if isinstance(value, dict):
        if "file" in value:
            yield value
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _entries(one)


def _tensor(run: Path, entry: Any) -> None:
    with suppress(TypeError, KeyError, OSError, ValueError, AttributeError):
        path = run / entry["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.array([[1.5, np.nan, np.inf, -2.0]], np.float32))


def hostile_root(root: Path, payload: str, *, keys: bool = False) -> Path:
    """Write sessions of all kinds whose texts are all this text. One session also has this text as its name."""
    documents = {
        kind: all_texts(one, lambda _: payload, keys=keys and kind not in ("trace", "call"))
        for kind, one in records().items()
    }
    write_sessions(root, documents)
    plain = records()
    plain["run"]["cases"][0]["name"] = payload
    named = "".join(char for char in payload if char not in "/\0").encode(errors="replace")[:200]
    if name := named.decode(errors="ignore").strip("."):
        write_record(root / name / "run.json", plain["run"])
        logs = root / name / "logs"
        logs.mkdir(exist_ok=True)
        (logs / f"{name[:50]}.log").write_text(payload.encode(errors="replace").decode())
    return root
