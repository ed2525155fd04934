"""Load the triage of `--known`: a triage file, a list of expected failures, or a `hil web` server."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hil.controller.records.decisions.triage import TriageEntry
from hil.controller.storage.paths import path_exists
from hil.controller.web.publish.web_client import WebClient
from hil.controller.workloads.suites.expected import parse, read_text
from hil.controller.workloads.triage.entries import TriageList
from hil.controller.workloads.triage.exchange import import_expectations
from hil.controller.workloads.triage.triage_file import parse_triage, read_triage
from hil.errors import UsageError

_SCHEMES = ("http://", "https://")
_PATH = "/triage.json"
_EXPECTED_SUFFIX = ".toml"


def load_known(text: str) -> TriageList:
    """Return the triage entries of a file or server.

    Args:
        text: triage file (JSON), list of expected failures (TOML), or the URL of `hil web`.

    Raises:
        UsageError: the file or the response is missing or invalid.
        FarmUnreachable: the server does not respond.
    """
    if text.startswith(_SCHEMES):
        address, mark, query = text.partition("?")
        address = f"{address.removesuffix(_PATH)}{mark}{query}"
        with WebClient(address, os.environ.get("HIL_WEB_TOKEN", ""), reads_only=True) as client:
            return parse_triage(client.check(client.ask("GET", _PATH, b"")), client.address)
    path = Path(text)
    if not path_exists(path):
        raise UsageError(f"file {text} not found", hint="create it with hil triage set, or with the pages of hil web")
    if path.suffix == _EXPECTED_SUFFIX:
        return TriageList(read_expected_entries(path))
    return read_triage(path)


def read_expected_entries(path: Path, suite: str = "", owner: str = "") -> tuple[TriageEntry, ...]:
    """Return the entries of a list of expected failures as triage entries. Raises UsageError."""
    return tuple(import_expectations((), parse(read_text(path), path), suite=suite, owner=owner, now=time.time())[0])
