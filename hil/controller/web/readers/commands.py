"""Derive the command that repeats a stored session from its record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.settings.repeat import run_command
from hil.controller.web.readers.fields import read_mapping, read_mappings
from hil.controller.web.text.entries import read_text
from hil.controller.workloads.suites.request import SuiteRequest

# Exceptions for a request that is damaged or from another version.
_WRONG = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)


def make_run_command(document: Mapping[str, Any], case: Mapping[str, Any] | None = None) -> str:
    """Return the command that repeats a run or one of its cases, or "" if the record is not sufficient.

    For bundles, traces and benches, the command repeats all cases, because a case depends on the other cases.
    """
    if typed := read_text(document.get("command")):
        return typed
    request = read_mapping(document.get("request"))
    names = [str(one.get("name")) for one in read_mappings(document.get("cases"))]
    try:
        job = Job.from_record(request)
        if not job.models or any(path.suffix == ".hilb" for path in job.models):
            return ""
        if names and all(name.startswith("call_") for name in names):
            return ""
        named = [path for path in job.models if case is not None and str(path) == str(case.get("path"))]
        return run_command(job, [Path(one) for one in named])
    except _WRONG:
        return ""


def make_suite_command(head: Mapping[str, Any]) -> str:
    """Return the command that repeats a suite run, or "" if the record is not sufficient."""
    command = read_text(head.get("command"))
    if command.startswith("pytest "):
        return command
    try:
        request = SuiteRequest.from_json(read_mapping(head.get("request")))
        return request.command() if request.source else ""
    except _WRONG:
        return ""
