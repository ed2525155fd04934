"""The command that does a stored session again, as far as its record tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.pipeline.options import Job
from hil.controller.pipeline.repeat import run_command
from hil.controller.web.entries import text
from hil.controller.web.readers.fields import mapping, mappings
from hil.controller.workloads.suites.request import Request

# What a request of another version, or a damaged one, may come to.
_WRONG = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)


def command_of_run(document: Mapping[str, Any], case: Mapping[str, Any] | None = None) -> str:
    """The command that does a run again, or one case of it; "" where its record does not tell.

    Of a bundle, a trace or a bench all cases are done again: one is part of the whole.
    """
    if typed := text(document.get("command")):
        return typed
    request = mapping(document.get("request"))
    names = [str(one.get("name")) for one in mappings(document.get("cases"))]
    try:
        job = Job.of_record(request)
        if not job.models or any(path.suffix == ".hilb" for path in job.models):
            return ""
        if names and all(name.startswith("call_") for name in names):
            return ""
        named = [path for path in job.models if case is not None and str(path) == str(case.get("path"))]
        return run_command(job, [Path(one) for one in named])
    except _WRONG:
        return ""


def command_of_suite(head: Mapping[str, Any]) -> str:
    """The command that does a suite's run again; "" where its record does not tell."""
    command = text(head.get("command"))
    if command.startswith("pytest "):
        return command
    try:
        request = Request.of_json(mapping(head.get("request")))
        return request.command() if request.source else ""
    except _WRONG:
        return ""
