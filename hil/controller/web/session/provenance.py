"""List the provenance of a case as names and values: board, runtime, compiler, flags, placement, versions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hil.controller.web.readers.analyses import row_toolchain
from hil.controller.web.readers.fields import listed, mapping, mappings
from hil.controller.web.text.entries import text
from hil.core.results import placement_text

Facts = Sequence[tuple[str, str]]
# Maximum list entries and characters per text to show. The page also has the whole record.
_MOST, _CHARS = 40, 2000


def facts_of_run(record: Mapping[str, Any], document: Mapping[str, Any]) -> Facts:
    """Return the facts about a case of a run or a bench."""
    artifact, model = mapping(record.get("artifact")), mapping(record.get("model"))
    provenance, board = mapping(record.get("provenance")), mapping(document.get("board"))
    info = mapping(board.get("info"))
    runtime = " ".join(filter(None, (text(artifact.get("runtime")), text(provenance.get("runtime_version")))))
    found = {
        "Board": text(provenance.get("board")) or text(board.get("name")),
        "Hardware": text(board.get("hw_type")),
        "Machine": machine(mapping(provenance.get("machine")) or mapping(info.get("machine"))),
        "Agent": text(provenance.get("agent_version")) or text(info.get("agent_version")),
        "Runtime": runtime,
        "Device": text(provenance.get("device")),
        "Ran on": placement(record.get("placement", provenance.get("placement"))),
        "Elsewhere": text(provenance.get("elsewhere")),
        "Without an agent": text(mapping(provenance.get("command")).get("why")),
        "Compiler": text(artifact.get("compiler")),
        "Flags": words(artifact.get("flags")),
        "Function": text(artifact.get("function")),
        "Program": ", ".join(text(one) for one in list(mapping(artifact.get("digests")).values())[:_MOST]),
        "Model": " ".join(filter(None, (text(record.get("path")), text(model.get("digest"))))),
        "From the cache": ", ".join(map(text, listed(record.get("cached"))[:_MOST])),
        "Readings": readings(provenance.get("readings")),
        "Notes": "; ".join(map(text, listed(provenance.get("notes"))[:_MOST])),
    }
    return list(_drop_empty(found))


def facts_of_line(record: Mapping[str, Any], head: Mapping[str, Any]) -> Facts:
    """Return the facts about a case of a suite run."""
    info = mapping(mapping(head.get("board_info")).get(text(record.get("board"))))
    info = mapping(info.get("info")) or info
    cached = record.get("cached")
    found = {
        "Board": text(record.get("board")),
        "Hardware": text(record.get("hw_type")),
        "Machine": machine(mapping(info.get("machine"))),
        "Agent": text(info.get("agent_version")),
        "Runtime": text(record.get("runtime")),
        "Flow": text(record.get("flow")),
        "Ran on": placement(record.get("placement")),
        "Elsewhere": text(record.get("elsewhere")),
        "Answers": text(record.get("answers")),
        "Without an agent": text(record.get("agentless")),
        "Compiler's notes": text(mapping(record.get("notes")).get("text")),
        "Program": " ".join(filter(None, (text(record.get("program")), "from the cache" if cached is True else ""))),
        "Model": text(record.get("model")),
        "Layer": text(record.get("layer")),
        "Parameters": ", ".join(f"{text(key)} {text(one)}" for key, one in _first_items(record.get("params"))),
        "Versions": ", ".join(f"{text(key)} {text(one)}" for key, one in _first_items(head.get("versions"))),
    }
    return list(_drop_empty(found))


def facts_of_layer(record: Mapping[str, Any], document: Mapping[str, Any], finding: Mapping[str, Any]) -> Facts:
    """Return the facts about a layer of a bisection."""
    found = {
        "Board": text(document.get("board")),
        "Hardware": text(document.get("hw_type")),
        "Runtime": text(document.get("runtime")),
        "Flow": text(document.get("flow")),
        "Ran on": placement(finding.get("placement")),
        "Elsewhere": text(finding.get("elsewhere")),
        "Model": text(document.get("artifact_model")) or text(document.get("model")),
        "Nodes": words(record.get("nodes")),
        "Tensors": words(record.get("tensors")),
    }
    return list(_drop_empty(found))


def facts_of_row(row: Mapping[str, Any], document: Mapping[str, Any]) -> Facts:
    """Return the facts about a row of a study."""
    found = {
        "Experiment": text(row.get("title")),
        "Reported": text(row.get("reported")),
        "Board": text(mapping(document.get("board")).get("name")),
        "Compiler": text(row.get("compiler")) or row_toolchain(row),
        "Ran on": placement(row.get("placement")),
        "Program": text(row.get("program")),
        "Steps that agree": text(row.get("steps")),
    }
    return list(_drop_empty(found))


def machine(known: Mapping[str, Any]) -> str:
    """Format a machine, as in ``Cortex-A76, aarch64, 4 cores, Linux 6.1``."""
    cores = f"{text(known.get('cores'))} cores" if known.get("cores") else ""
    system = " ".join(filter(None, (text(known.get("system")), text(known.get("kernel")))))
    return ", ".join(filter(None, (text(known.get("cpu_model")), text(known.get("arch")), cores, system)))


def placement(parts: Any) -> str:
    """Format the devices that ran the parts of a program."""
    try:
        return placement_text((part["device"], part["nodes"]) for part in mappings(parts)[:_MOST])[:_CHARS]
    except (KeyError, TypeError, ValueError):
        return ""


def words(values: Any) -> str:
    """Quote a list of texts for a shell."""
    return shlex.join(map(text, listed(values)[:_MOST]))[:_CHARS]


def readings(values: Any) -> str:
    """Format readings, as in ``temperature 51.2 C, clock 2400 MHz``."""
    found = [" ".join(text(one.get(key)) for key in ("name", "value", "unit")) for one in mappings(values)[:_MOST]]
    return ", ".join(found)


def _first_items(value: Any) -> list[tuple[Any, Any]]:
    return list(mapping(value).items())[:_MOST]


def _drop_empty(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in found.items() if value.strip())
