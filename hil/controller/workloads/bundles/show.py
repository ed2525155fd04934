"""Display bundles and results of bundle runs, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.bundles import Bundle, Method
from hil.bundles.signature import format_fingerprint
from hil.compare.stats import STATISTICS, find_worst
from hil.controller.pipeline.records.evidence import format_criterion
from hil.controller.pipeline.records.next_steps import make_case_hint
from hil.controller.pipeline.records.print_case import COLOURS
from hil.controller.pipeline.records.record import record_specs
from hil.controller.records.base import parse_number
from hil.controller.records.commands.bundles import (
    BundleDescription,
    CaseDescription,
    FileDescription,
    MethodDescription,
    ProgramDescription,
    TensorDescription,
)
from hil.controller.records.outputs import note_software_devices
from hil.controller.records.run import RunCase, RunRecord
from hil.controller.storage.screen.texts import format_count, make_table, print_labelled
from hil.core.digest import digest_of
from hil.core.results import Outcome
from hil.core.tensors import Array, get_dtype_name, to_bytes, type_text

if TYPE_CHECKING:
    from rich.console import Console

_STATISTICS = [one for one in STATISTICS if one.brief]
_COLUMNS = ["case", "outcome", "mismatches", *(one.heading for one in _STATISTICS), "device"]
# If a bundle has more cases than this, show the criteria only for cases that did not pass.
_CRITERIA_SHOWN = 10


def describe_bundle(bundle: Bundle, path: Path) -> BundleDescription:
    """Describe a bundle without tensor data."""
    program = bundle.program
    return BundleDescription(
        path=str(path),
        bytes=bundle.head.size,
        digest=bundle.digest,
        signed_by=format_fingerprint(bundle.head.public_key) if bundle.head.signature else "",
        program=ProgramDescription(
            runtime=program.runtime,
            main=program.main,
            compiler=program.compiler,
            flags=list(program.flags),
            files=[
                FileDescription(name=name, bytes=data.nbytes, digest=digest_of(data))
                for name, data in program.files.items()
            ],
        ),
        methods=[_describe_method(method) for method in bundle.methods],
        made=dict(bundle.made),
        exit_code=0,
    )


def format_size(bundle: Bundle) -> str:
    """Return the number of methods and cases: ``1 method, 3 cases``."""
    cases = sum(len(method.cases) for method in bundle.methods)
    return f"{format_count(len(bundle.methods), 'method')}, {format_count(cases, 'case')}"


def _describe_method(method: Method) -> MethodDescription:
    return MethodDescription(
        name=method.name,
        inputs=record_specs(method.signature.inputs),
        outputs=record_specs(method.signature.outputs),
        cases=[
            CaseDescription(
                name=case.name,
                source=case.source,
                rtol=case.rtol,
                atol=case.atol,
                accept=list(case.accept),
                inputs=_describe_tensors(case.inputs),
                outputs=_describe_tensors(case.expected_outputs),
            )
            for case in method.cases
        ],
    )


def _describe_tensors(tensors: Mapping[str, Array]) -> list[TensorDescription]:
    found = []
    for name, array in tensors.items():
        dtype, shape, data = get_dtype_name(array.dtype), list(array.shape), to_bytes(array)
        found.append(TensorDescription(name=name, dtype=dtype, shape=shape, bytes=data.nbytes, digest=digest_of(data)))
    return found


def print_bundle(bundle: BundleDescription) -> None:
    """Print the description of a bundle."""
    from hil.controller.storage.screen.console import Console

    console = Console()
    print_labelled(console, "", f"{bundle.path}: {bundle.bytes:,} bytes", indent=0, whole=True)
    for label, text in _format_bundle(bundle):
        _print_labelled(console, label, text)


def _format_bundle(bundle: BundleDescription) -> Iterator[tuple[str, str]]:
    program, made = bundle.program, bundle.made
    yield "digest", bundle.digest
    yield "signed", bundle.signed_by or "no"
    yield "runtime", program.runtime
    yield "compiler", program.compiler
    yield from (("", flag) for flag in program.flags)
    yield from (("file", f"{file.name}, {file.bytes:,} bytes") for file in program.files)
    if isinstance(model := made.get("model"), dict):
        yield "model", f"{model.get('name')!s} {model.get('digest')!s}"
    if target := made.get("target"):
        yield "target", str(target)
    for method in bundle.methods:
        takes, gives = (
            ", ".join(f"{spec.name}: {type_text(spec.dtype, spec.shape)}" for spec in specs)
            for specs in (method.inputs, method.outputs)
        )
        yield "method", f"{method.name}({takes}) -> ({gives})"
        for case in method.cases:
            tolerances = (("rtol", case.rtol), ("atol", case.atol))
            given = [f"{name} {value:g}" for name, value in tolerances if value is not None] + case.accept
            size = sum(tensor.bytes for tensor in (*case.inputs, *case.outputs))
            words = [case.source and f"source: {case.source}", *given, f"{size:,} bytes"]
            yield "case", f"{case.name}: {', '.join(word for word in words if word)}"


def print_run(record: RunRecord) -> None:
    """Print a bundle run: a line per case, then the failures' reasons."""
    from rich.text import Text

    from hil.controller.storage.screen.console import Console

    console = Console()
    ended = [(case, case.outcome) for case in record.cases if case.outcome]
    rows = [
        (case.name, Text(outcome.value, COLOURS.get(outcome, "magenta")), *_list_statistics(case))
        for case, outcome in ended
    ]
    if rows:
        console.print(make_table(_COLUMNS, rows, numbers=_COLUMNS[2:], whole=_COLUMNS))
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in record.cases:
        if case.outcome is not Outcome.PASS:
            reasons.setdefault((case.reason, make_case_hint(case)), []).append(case.name)
    for (reason, hint), names in reasons.items():
        _print_labelled(console, "", f"{', '.join(names)}: {reason}", style="red")
        if hint:
            _print_labelled(console, "hint", hint)
    are_few = len(record.cases) <= _CRITERIA_SHOWN
    for case in (one for one in record.cases if are_few or one.outcome is not Outcome.PASS):
        # A bundle has a single reference: the expected outputs.
        for output in (output for verdict in case.verdicts for output in verdict.outputs):
            for criterion in output.criteria:
                style = "green" if criterion.passed else "red"
                _print_labelled(console, "", f"{case.name}, {output.name}: {format_criterion(criterion)}", style=style)
    known = [case.provenance for case in record.cases if case.provenance]
    notes = [one.elsewhere for one in known if one.elsewhere]
    notes += [note for one in known for note in note_software_devices(one.placement)]
    for note in dict.fromkeys(notes):
        _print_labelled(console, "note", note)
    passed = sum(case.outcome is Outcome.PASS for case in record.cases)
    where = f" on {record.board.name}" if record.board else ""
    where += f", stored in {record.folder}" if record.folder else ""
    print_labelled(console, "", f"{passed} of {len(record.cases)} cases passed{where}", indent=0, whole=True)


def _list_statistics(case: RunCase) -> list[str]:
    found = find_worst(
        {
            "mismatches": output.mismatches,
            "elements": output.elements,
            **{one.key: parse_number(getattr(output, one.key)) for one in STATISTICS},
        }
        for verdict in case.verdicts
        for output in verdict.outputs
    )
    compared = found["mismatches"] is not None
    device, shown = case.device, "-"
    if device and device.p50_ns is not None:
        count, cold = device.iterations, device.cold_ns is not None
        shown = f"{device.p50_ns / 1e6:.3g} ms" + (f" of {count}" if count > 1 else " cold" if cold else "")
        shown += f", {case.grade.grade}" if case.grade and case.grade.reasons else ""
    mismatches = f"{found['mismatches']} of {found['elements']}" if compared else "-"
    return [mismatches, *(_number(found[one.key] if compared else None) for one in _STATISTICS), shown]


def _print_labelled(console: Console, label: str, text: str, style: str = "") -> None:
    """Print a labelled line.

    Unprintable characters from the bundle, such as newlines and terminal escapes, are replaced.
    """
    shown = "".join(char if char.isprintable() else "?" for char in text)
    print_labelled(console, label or " ", shown, style=style, width=11, whole=True)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
