"""Read stored traces of a module's calls. Each call is a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.tensorflow.graphs import name_new_value
from hil.controller.web.readers.fields import (
    read_common_fields,
    read_document,
    read_list,
    read_mapping,
    read_mappings,
    read_statistics,
)
from hil.controller.web.text.entries import CaseEntry, SessionEntry, read_int, read_real, read_text, read_texts
from hil.controller.web.text.names import quote_command
from hil.controller.workloads.traces.trace import COMPARISON, OF_TRACE, call_name

CALL = "call.json"
# Maximum number of calls to read from a trace.
_MAX_CALLS = 10_000
# Maximum number of tensors to read from a call.
_MAX_TENSORS = 10_000


def is_trace(document: Mapping[str, Any]) -> bool:
    """Return whether the document is a hil trace. Other tools use the same file name."""
    names = ("module_name", "backend", "name")
    return all(isinstance(document.get(name), str) for name in names) and "calls" in document


def call_case(number: int, method: str) -> str:
    """Return the case name of a call, as `hil trace run` writes it."""
    return f"{call_name(number)}_{method}"


def read_comparison(folder: Path, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stored comparison of a trace with its reference, or {} if the comparison belongs to another trace.

    A stale comparison can remain after a user copies one directory over another.
    """
    try:
        found = read_document(folder / COMPARISON)
    except (OSError, ValueError):
        return {}
    created = read_real(document.get("created"))
    return found if created is not None and created == read_real(found.get(OF_TRACE)) else {}


def read_compared_calls(comparison: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the calls of a comparison by number."""
    found = ((read_int(one.get("call")), one) for one in read_mappings(comparison.get("calls")))
    return {number: one for number, one in found if number is not None}


def map_output_names(call: Mapping[str, Any]) -> dict[str, str]:
    """Map each tensor file of a call to its output name, as :func:`arrays_in` and comparisons use it."""
    waiting: list[tuple[str, Any]] = [(str(number), one) for number, one in enumerate(read_list(call.get("outputs")))]
    pairs = [pair for pair in read_list(call.get("assigned")) if isinstance(pair, list) and len(pair) == 2]
    waiting += [(name_new_value(read_text(name)), value) for name, value in pairs]
    found: dict[str, str] = {}
    while waiting and len(found) < _MAX_TENSORS:
        path, saved = waiting.pop()
        saved = read_mapping(saved)
        if file := read_text(saved.get("npy")):
            found[file] = path
        inner: list[Any] = list(enumerate(read_list(saved.get("list")) or read_list(saved.get("tuple"))))
        inner += [pair for pair in read_list(saved.get("dict")) if isinstance(pair, list) and len(pair) == 2]
        waiting += [(f"{path}.{read_text(name)}", one) for name, one in inner]
    return found


def read_trace(session_id: str, folder: Path, document: Mapping[str, Any]) -> tuple[SessionEntry, list[CaseEntry]]:
    """Read a trace. If the trace has a comparison with a reference, the calls get the comparison's outcomes."""
    module, backend, name = (read_text(document.get(key)) for key in ("module_name", "backend", "name"))
    count = read_int(document.get("calls")) or 0
    comparison = read_comparison(folder, document)
    compared = read_compared_calls(comparison)
    cases = []
    for number in range(min(max(count, 0), _MAX_CALLS)):
        try:
            call = read_document(folder / call_name(number) / CALL)
        except (OSError, ValueError) as error:
            call = {"method": "", "error": f"{call_name(number)} cannot be read: {error}"}
        found = compared.get(number, {})
        verdict = read_mapping(found.get("verdict"))
        cases.append(
            CaseEntry(
                read_text(call_case(number, read_text(call.get("method")))),
                number,
                model=module,
                runtime=read_text(read_mapping(call.get("program")).get("runtime")),
                board=backend,
                outcome="LOAD_ERROR" if call.get("error") else read_text(found.get("outcome")),
                message=read_text(call.get("error"))
                or read_text(found.get("reason"))
                or read_text(verdict.get("reason")),
                **read_statistics(verdict.get("outputs")),
            )
        )
    ended, runtimes = read_text(document.get("error")), read_texts([case.runtime for case in cases])
    session = SessionEntry(
        session_id,
        "trace",
        read_text(f"{module}.{name}"),
        **{
            **read_common_fields(document),
            "command": read_text(document.get("command")) or _repeat_command(folder, runtimes),
        },
        boards=read_texts([backend]),
        runtimes=runtimes,
        models=read_texts([module]),
        versions={"ran by": read_text(document.get("ran_by"))} if document.get("ran_by") else {},
        planned=max(count, 0),
        error=f"incomplete trace: {ended}" if ended else "",
        outcome=read_text(comparison.get("outcome")),
    )
    return session, cases


def _repeat_command(folder: Path, runtimes: Sequence[str]) -> str:
    """Return the command that repeats a trace without a recorded command. Only calls of programs can be repeated."""
    return quote_command(["hil", "trace", "run", str(folder)]) if runtimes else ""
