"""List the provenance of a case as names and values: board, runtime, compiler, flags, placement, versions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hil.controller.web.readers.analyses import read_row_toolchain
from hil.controller.web.readers.fields import read_list, read_mapping, read_mappings
from hil.controller.web.text.entries import read_text
from hil.core.placement_reasons import format_reasons
from hil.core.results import format_node_counts

Facts = Sequence[tuple[str, str]]
# Maximum list entries and characters per text to show. The page also has the whole record.
_MOST, _CHARS = 40, 2000


def list_run_facts(record: Mapping[str, Any], document: Mapping[str, Any]) -> Facts:
    """Return the facts about a case of a run or a bench."""
    artifact, model = read_mapping(record.get("artifact")), read_mapping(record.get("model"))
    provenance, board = read_mapping(record.get("provenance")), read_mapping(document.get("board"))
    info = read_mapping(board.get("info"))
    runtime = " ".join(filter(None, (read_text(artifact.get("runtime")), read_text(provenance.get("runtime_version")))))
    found = {
        "Board": read_text(provenance.get("board")) or read_text(board.get("name")),
        "Hardware": read_text(board.get("hw_type")),
        "Machine": format_machine(read_mapping(provenance.get("machine")) or read_mapping(info.get("machine"))),
        "Stack": format_stack(provenance.get("stack") or info.get("stack")),
        "Agent": read_text(provenance.get("agent_version")) or read_text(info.get("agent_version")),
        "Runtime": runtime,
        "Device": read_text(provenance.get("device")),
        "Ran on": format_placement(record.get("placement", provenance.get("placement"))),
        "Why elsewhere": format_placement_reasons(record.get("placement", provenance.get("placement")), runtime),
        "Elsewhere": read_text(provenance.get("elsewhere")),
        "Peak device memory": _format_bytes(record.get("peak_device_memory_bytes")),
        "Without an agent": read_text(read_mapping(provenance.get("command")).get("why")),
        "Compiler": read_text(artifact.get("compiler")),
        "Flags": quote_words(artifact.get("flags")),
        "Function": read_text(artifact.get("function")),
        "Program": ", ".join(read_text(one) for one in list(read_mapping(artifact.get("digests")).values())[:_MOST]),
        "Model": " ".join(filter(None, (read_text(record.get("path")), read_text(model.get("digest"))))),
        "From the cache": ", ".join(map(read_text, read_list(record.get("cached"))[:_MOST])),
        "Readings": format_readings(provenance.get("readings")),
        "Notes": "; ".join(map(read_text, read_list(provenance.get("notes"))[:_MOST])),
    }
    return list(_drop_empty(found))


def list_line_facts(record: Mapping[str, Any], head: Mapping[str, Any]) -> Facts:
    """Return the facts about a case of a suite run."""
    info = read_mapping(read_mapping(head.get("board_info")).get(read_text(record.get("board"))))
    info = read_mapping(info.get("info")) or info
    cached = record.get("cached")
    found = {
        "Board": read_text(record.get("board")),
        "Hardware": read_text(record.get("hw_type")),
        "Machine": format_machine(read_mapping(info.get("machine"))),
        "Stack": format_stack(info.get("stack")),
        "Agent": read_text(info.get("agent_version")),
        "Runtime": read_text(record.get("runtime")),
        "Flow": read_text(record.get("flow")),
        "Ran on": format_placement(record.get("placement")),
        "Why elsewhere": format_placement_reasons(record.get("placement"), read_text(record.get("runtime"))),
        "Elsewhere": read_text(record.get("elsewhere")),
        "Answers": read_text(record.get("answers")),
        "Without an agent": read_text(record.get("agentless")),
        "Compiler's notes": read_text(read_mapping(record.get("notes")).get("text")),
        "Program": " ".join(
            filter(None, (read_text(record.get("program")), "from the cache" if cached is True else ""))
        ),
        "Model": read_text(record.get("model")),
        "Layer": read_text(record.get("layer")),
        "Parameters": ", ".join(
            f"{read_text(key)} {read_text(one)}" for key, one in _list_first_items(record.get("params"))
        ),
        "Versions": ", ".join(
            f"{read_text(key)} {read_text(one)}" for key, one in _list_first_items(head.get("versions"))
        ),
    }
    return list(_drop_empty(found))


def list_layer_facts(record: Mapping[str, Any], document: Mapping[str, Any], finding: Mapping[str, Any]) -> Facts:
    """Return the facts about a layer of a bisection."""
    found = {
        "Board": read_text(document.get("board")),
        "Hardware": read_text(document.get("hw_type")),
        "Runtime": read_text(document.get("runtime")),
        "Flow": read_text(document.get("flow")),
        "Ran on": format_placement(finding.get("placement")),
        "Why elsewhere": format_placement_reasons(finding.get("placement"), read_text(document.get("runtime"))),
        "Elsewhere": read_text(finding.get("elsewhere")),
        "Model": read_text(document.get("artifact_model")) or read_text(document.get("model")),
        "Nodes": quote_words(record.get("nodes")),
        "Tensors": quote_words(record.get("tensors")),
    }
    return list(_drop_empty(found))


def list_row_facts(row: Mapping[str, Any], document: Mapping[str, Any]) -> Facts:
    """Return the facts about a row of a study."""
    found = {
        "Experiment": read_text(row.get("title")),
        "Reported": read_text(row.get("reported")),
        "Board": read_text(read_mapping(document.get("board")).get("name")),
        "Compiler": read_text(row.get("compiler")) or read_row_toolchain(row),
        "Ran on": format_placement(row.get("placement")),
        "Program": read_text(row.get("program")),
        "Steps that agree": read_text(row.get("steps")),
    }
    return list(_drop_empty(found))


def format_machine(known: Mapping[str, Any]) -> str:
    """Format a machine, as in ``Cortex-A76, aarch64, 4 cores, Linux 6.1``."""
    cores = f"{read_text(known.get('cores'))} cores" if known.get("cores") else ""
    system = " ".join(filter(None, (read_text(known.get("system")), read_text(known.get("kernel")))))
    return ", ".join(filter(None, (read_text(known.get("cpu_model")), read_text(known.get("arch")), cores, system)))


def format_stack(parts: Any) -> str:
    """Format the parts of a stack, as in ``driver 1.0, firmware unknown``."""
    found = [
        f"{read_text(one.get('name'))} {read_text(one.get('version')) or 'unknown'}"
        for one in read_mappings(parts)[:_MOST]
    ]
    return ", ".join(found)[:_CHARS]


def format_placement(parts: Any) -> str:
    """Format the devices that ran the parts of a program."""
    try:
        return format_node_counts((part["device"], part["nodes"]) for part in read_mappings(parts)[:_MOST])[:_CHARS]
    except (KeyError, TypeError, ValueError):
        return ""


def format_placement_reasons(parts: Any, runtime: str) -> str:
    """Format why parts did not run on the requested device. Records of earlier versions have no reasons."""
    try:
        found = [
            line
            for part in read_mappings(parts)[:_MOST]
            if part.get("elsewhere") is True and "reasons" in part
            for line in format_reasons(
                [
                    (one["text"], one["nodes"], list(map(read_text, read_list(one.get("names")))))
                    for one in read_mappings(part["reasons"])[:_MOST]
                ],
                part["nodes"],
                part["device"],
                runtime or "the runtime",
            )
        ]
    except (KeyError, TypeError, ValueError):
        return ""
    return "; ".join(found)[:_CHARS]


def quote_words(values: Any) -> str:
    """Quote a list of texts for a shell."""
    return shlex.join(map(read_text, read_list(values)[:_MOST]))[:_CHARS]


def format_readings(values: Any) -> str:
    """Format readings, as in ``temperature 51.2 C, clock 2400 MHz``."""
    found = [
        " ".join(read_text(one.get(key)) for key in ("name", "value", "unit")) for one in read_mappings(values)[:_MOST]
    ]
    return ", ".join(found)


def _format_bytes(value: Any) -> str:
    return (
        f"{value / 1e6:,.3f} MB"
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63
        else ""
    )


def _list_first_items(value: Any) -> list[tuple[Any, Any]]:
    return list(read_mapping(value).items())[:_MOST]


def _drop_empty(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in found.items() if value.strip())
