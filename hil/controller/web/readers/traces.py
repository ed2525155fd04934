"""Read stored traces of a module's calls. Each call is a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.tensorflow.graphs import new_value
from hil.controller.web.readers.fields import common, listed, mapping, mappings, read_document, statistics
from hil.controller.web.text.entries import CaseEntry, SessionEntry, real, text, texts, whole
from hil.controller.web.text.names import command_text
from hil.controller.workloads.traces.trace import COMPARISON, OF_TRACE, call_name

CALL = "call.json"
# Maximum number of calls to read from a trace.
_MOST_CALLS = 10_000
# Maximum number of tensors to read from a call.
_MOST_TENSORS = 10_000


def is_trace(document: Mapping[str, Any]) -> bool:
    """Return whether the document is a hil trace. Other tools use the same file name."""
    names = ("module_name", "backend", "name")
    return all(isinstance(document.get(name), str) for name in names) and "calls" in document


def call_case(number: int, method: str) -> str:
    """Return the case name of a call, as `hil trace run` writes it."""
    return f"{call_name(number)}_{method}"


def comparison_of(folder: Path, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stored comparison of a trace with its reference, or {} if the comparison belongs to another trace.

    A stale comparison can remain after a user copies one directory over another.
    """
    try:
        found = read_document(folder / COMPARISON)
    except (OSError, ValueError):
        return {}
    created = real(document.get("created"))
    return found if created is not None and created == real(found.get(OF_TRACE)) else {}


def compared_calls(comparison: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the calls of a comparison by number."""
    found = ((whole(one.get("call")), one) for one in mappings(comparison.get("calls")))
    return {number: one for number, one in found if number is not None}


def names_of_outputs(call: Mapping[str, Any]) -> dict[str, str]:
    """Map each tensor file of a call to its output name, as :func:`arrays_in` and comparisons use it."""
    waiting: list[tuple[str, Any]] = [(str(number), one) for number, one in enumerate(listed(call.get("outputs")))]
    pairs = [pair for pair in listed(call.get("assigned")) if isinstance(pair, list) and len(pair) == 2]
    waiting += [(new_value(text(name)), value) for name, value in pairs]
    found: dict[str, str] = {}
    while waiting and len(found) < _MOST_TENSORS:
        path, saved = waiting.pop()
        saved = mapping(saved)
        if file := text(saved.get("npy")):
            found[file] = path
        inner: list[Any] = list(enumerate(listed(saved.get("list")) or listed(saved.get("tuple"))))
        inner += [pair for pair in listed(saved.get("dict")) if isinstance(pair, list) and len(pair) == 2]
        waiting += [(f"{path}.{text(name)}", one) for name, one in inner]
    return found


def read_trace(session_id: str, folder: Path, document: Mapping[str, Any]) -> tuple[SessionEntry, list[CaseEntry]]:
    """Read a trace. If the trace has a comparison with a reference, the calls get the comparison's outcomes."""
    module, backend, name = (text(document.get(key)) for key in ("module_name", "backend", "name"))
    count = whole(document.get("calls")) or 0
    comparison = comparison_of(folder, document)
    compared = compared_calls(comparison)
    cases = []
    for number in range(min(max(count, 0), _MOST_CALLS)):
        try:
            call = read_document(folder / call_name(number) / CALL)
        except (OSError, ValueError) as error:
            call = {"method": "", "error": f"{call_name(number)} cannot be read: {error}"}
        found = compared.get(number, {})
        verdict = mapping(found.get("verdict"))
        cases.append(
            CaseEntry(
                text(call_case(number, text(call.get("method")))),
                number,
                model=module,
                runtime=text(mapping(call.get("program")).get("runtime")),
                board=backend,
                outcome="LOAD_ERROR" if call.get("error") else text(found.get("outcome")),
                message=text(call.get("error")) or text(found.get("reason")) or text(verdict.get("reason")),
                **statistics(verdict.get("outputs")),
            )
        )
    ended, runtimes = text(document.get("error")), texts([case.runtime for case in cases])
    session = SessionEntry(
        session_id,
        "trace",
        text(f"{module}.{name}"),
        **{**common(document), "command": text(document.get("command")) or _repeat_command(folder, runtimes)},
        boards=texts([backend]),
        runtimes=runtimes,
        models=texts([module]),
        versions={"ran by": text(document.get("ran_by"))} if document.get("ran_by") else {},
        planned=max(count, 0),
        error=f"incomplete trace: {ended}" if ended else "",
        outcome=text(comparison.get("outcome")),
    )
    return session, cases


def _repeat_command(folder: Path, runtimes: Sequence[str]) -> str:
    """Return the command that repeats a trace without a recorded command. Only calls of programs can be repeated."""
    return command_text(["hil", "trace", "run", str(folder)]) if runtimes else ""
