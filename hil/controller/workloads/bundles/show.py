"""A bundle, and what its cases came to, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.bundles import Bundle, Method
from hil.bundles.signature import fingerprint
from hil.compare.stats import STATISTICS, worst_of
from hil.controller.storage.texts import table
from hil.core.digest import digest_of
from hil.core.tensors import Array, dtype_name, to_bytes, type_text

if TYPE_CHECKING:
    from rich.console import Console

_STATISTICS = [one for one in STATISTICS if one.brief]
_COLUMNS = ["case", "outcome", "mismatches", *(one.heading for one in _STATISTICS), "device"]


def document_of(bundle: Bundle, path: Path) -> dict[str, Any]:
    """What a bundle holds, but for the bytes."""
    program = bundle.program
    return {
        "schema": 1,
        "path": str(path),
        "bytes": bundle.head.size,
        "digest": bundle.digest,
        "signed_by": fingerprint(bundle.head.public_key) if bundle.head.signature else "",
        "program": {
            "runtime": program.runtime,
            "main": program.main,
            "compiler": program.compiler,
            "flags": list(program.flags),
            "files": [
                {"name": name, "bytes": data.nbytes, "digest": digest_of(data)} for name, data in program.files.items()
            ],
        },
        "methods": [_method(method) for method in bundle.methods],
        "made": dict(bundle.made),
        "exit_code": 0,
    }


def counted(bundle: Bundle) -> str:
    """How many methods and cases it has: ``1 method, 3 cases``."""
    cases = sum(len(method.cases) for method in bundle.methods)
    numbers = {"method": len(bundle.methods), "case": cases}
    return ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for word, number in numbers.items())


def _method(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "inputs": [asdict(spec) for spec in method.signature.inputs],
        "outputs": [asdict(spec) for spec in method.signature.outputs],
        "cases": [
            {
                "name": case.name,
                "source": case.source,
                "rtol": case.rtol,
                "atol": case.atol,
                "inputs": _tensors(case.inputs),
                "outputs": _tensors(case.expected_outputs),
            }
            for case in method.cases
        ],
    }


def _tensors(tensors: Mapping[str, Array]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": dtype_name(array.dtype),
            "shape": list(array.shape),
            "bytes": to_bytes(array).nbytes,
            "digest": digest_of(to_bytes(array)),
        }
        for name, array in tensors.items()
    ]


def print_bundle(document: Mapping[str, Any]) -> None:
    """A bundle's document on the terminal."""
    from hil.controller.storage.console import Console

    console = Console()
    program = document["program"]
    console.print(f"{document['path']}: {document['bytes']:,} bytes", highlight=False, markup=False, soft_wrap=True)
    _say(console, "digest", document["digest"])
    _say(console, "signed", document["signed_by"] or "no")
    _say(console, "runtime", program["runtime"])
    _say(console, "compiler", program["compiler"])
    for flag in program["flags"]:
        _say(console, "", flag)
    for file in program["files"]:
        _say(console, "file", f"{file['name']}, {file['bytes']:,} bytes")
    model, target = document["made"].get("model"), document["made"].get("target")
    if isinstance(model, dict):
        _say(console, "model", f"{model.get('name')!s} {model.get('digest')!s}")
    if target:
        _say(console, "target", str(target))
    for method in document["methods"]:
        _say(console, "method", _call(method))
        for case in method["cases"]:
            given = [f"{name} {case[name]:g}" for name in ("rtol", "atol") if case[name] is not None]
            size = sum(tensor["bytes"] for kind in ("inputs", "outputs") for tensor in case[kind])
            words = [case["source"] and f"as {case['source']} says", *given, f"{size:,} bytes"]
            _say(console, "case", f"{case['name']}: {', '.join(word for word in words if word)}")


def _call(method: Mapping[str, Any]) -> str:
    takes, gives = (
        ", ".join(f"{spec['name']}: {type_text(spec['dtype'], spec['shape'])}" for spec in method[kind])
        for kind in ("inputs", "outputs")
    )
    return f"{method['name']}({takes}) -> ({gives})"


def print_run(record: Mapping[str, Any]) -> None:
    """A run of a bundle on the terminal: a line a case, and below it why those failed that did."""
    from rich.text import Text

    from hil.controller.storage.console import Console

    console = Console()
    colours = {"PASS": "green", "FAIL": "red"}
    rows = [
        (case["name"], Text(case["outcome"], colours.get(case["outcome"], "magenta")), *_statistics(case))
        for case in record["cases"]
    ]
    if rows:
        console.print(table(_COLUMNS, rows, numbers=_COLUMNS[2:], whole=_COLUMNS))
    for reason, names, hint in _reasons(record["cases"]):
        _say(console, "", f"{', '.join(names)}: {reason}", style="red")
        if hint:
            _say(console, "hint", hint)
    for note in dict.fromkeys(filter(None, (case["provenance"].get("elsewhere") for case in record["cases"]))):
        _say(console, "note", note)
    passed = sum(case["outcome"] == "PASS" for case in record["cases"])
    text = f"{passed} of {len(record['cases'])} cases passed{_where(record)}"
    text += f", stored in {record['folder']}" if record["folder"] else ""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _reasons(cases: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], str]]:
    """Why cases did not pass, each reason once: with their names, and what to do."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if case["outcome"] != "PASS":
            hint = case["error"]["hint"] if case["error"] else ""
            found.setdefault((case["reason"], hint), []).append(case["name"])
    return [(reason, names, hint) for (reason, hint), names in found.items()]


def _where(record: Mapping[str, Any]) -> str:
    board = record["board"].get("name", "")
    return f" on {board}" if board else ""


def _statistics(case: Mapping[str, Any]) -> list[str]:
    found = worst_of(output for verdict in case["verdicts"] for output in verdict["outputs"])
    if found["mismatches"] is None:
        return ["-", *("-" for _ in _STATISTICS), _device(case)]
    mismatches = f"{found['mismatches']} of {found['elements']}"
    return [mismatches, *(_number(found[one.key]) for one in _STATISTICS), _device(case)]


def _device(case: Mapping[str, Any]) -> str:
    device = case["device"]
    if not device or not device["iterations"]:
        return "-"
    cold = " cold" if device["iterations"] == 1 and device.get("cold_ns") is not None else ""
    return f"{device['p50_ns'] / 1e6:.3g} ms{cold}"


def _say(console: Console, label: str, text: str, style: str = "") -> None:
    from rich.text import Text

    # What a bundle says of its making may hold anything, a terminal's orders too.
    shown = "".join(char if char.isprintable() else "?" for char in text)
    console.print(Text(f"  {label:<11}{shown}", style=style), soft_wrap=True)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
