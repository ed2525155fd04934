"""Read and write test cases in files.

A test case is an .npz, or a directory of ``input_0.npy``, ``output_0.npy``, ... in the layout of ONNX test data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.bundles.manifest import (
    accept_json,
    check_file_name,
    encode_controls,
    encode_relation,
    encode_signature,
    name_of,
    parse_specs,
    take,
    take_accept,
    take_controls,
    take_noise,
    take_relation,
)
from hil.controller.models.inputs import make_spec_check
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import make_safe_name
from hil.controller.storage.tensor_files import load_named_pb
from hil.controller.workloads.bundles.methods import make_program
from hil.core.bounded_json import parse_json
from hil.core.files import read_file, resolve_within
from hil.core.npy import Npz, load_npy, restore_dtype, save_npy
from hil.core.results import NOISE_DTYPE
from hil.core.tensors import Array, TensorSpec
from hil.errors import UsageError, did_you_mean

_FILE = re.compile(r"(?P<kind>input|output)_(?P<number>\d+)\.(npy|pb)")
_FORMS = "use an .npz with a key per input (and output), or a directory of input_0.npy, ..., output_0.npy, ... (or .pb)"


def read_case(path: Path, signature: Signature, *, name: str = "") -> MethodTestCase:
    """Read a case from an .npz or a directory. Outputs are optional.

    Args:
        signature: signature of the method. The signature distinguishes inputs from outputs, and gives the dtype of raw
            bytes.
        name: name of the case; "" uses the file's name.

    Raises:
        UsageError: the file is unreadable, or contains tensors that are neither inputs nor outputs.
    """
    called = name or path.stem
    if path.is_dir():
        found = [_read_folder(path, *kind) for kind in (("input", signature.inputs), ("output", signature.outputs))]
        return MethodTestCase(found[0], found[1], name=called)
    if path.suffix != ".npz":
        raise UsageError(f"unsupported case file {path}", hint=_FORMS)
    specs = {spec.name: spec for spec in (*signature.outputs, *signature.inputs)}
    named = {}
    with Npz(path) as archive:
        for key in archive.keys:
            if key not in specs:
                hint = f"{did_you_mean(key, specs)}tensors of the method: {', '.join(specs)}"
                raise UsageError(f"{path}: unknown tensor {key!r}", hint=hint)
            named[key] = restore_dtype(archive.read(key, make_spec_check(specs[key], strict=False)), specs[key].dtype)
    inputs = {spec.name: named.pop(spec.name) for spec in signature.inputs if spec.name in named}
    return MethodTestCase(inputs, named, name=called)


def _read_folder(path: Path, kind: str, specs: Sequence[TensorSpec]) -> dict[str, Array] | list[Array]:
    """Return the inputs or outputs in a directory: by name if the files contain the model's names, else by position."""
    found: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        match = _FILE.fullmatch(file.name)
        if match and match["kind"] == kind:
            number = int(match["number"])
            if number in found:
                raise UsageError(f"{path}: duplicate {kind} {number}: {found[number].name} and {file.name}")
            found[number] = resolve_within(path, file)
    if sorted(found) != list(range(len(found))):
        missing = min(set(range(len(found))) - set(found))
        raise UsageError(f"{path}: missing {kind}_{missing}", hint=_FORMS)
    dtypes = [*(spec.dtype for spec in specs), *[""] * len(found)]
    ordered = [(found[number], dtypes[number]) for number in sorted(found)]
    named = [
        load_named_pb(file) if file.suffix == ".pb" else ("", load_npy(file, dtype, mmap=True))
        for file, dtype in ordered
    ]
    return _match_names(named, specs) or [array for _, array in named]


def _match_names(named: Sequence[tuple[str, Array]], specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return the tensors by name. Return {} if names are repeated or are not in the model."""
    arrays = dict(named)
    is_named = len(arrays) == len(named) and arrays.keys() <= {spec.name for spec in specs}
    return arrays if is_named else {}


GOLDEN_INDEX = "golden.json"
_VERSION = 1
_MAX_INDEX_BYTES = 16 << 20


def write_golden(bundle: Bundle, path: Path, *, context: RunContext) -> None:
    """Write a golden directory."""
    program = bundle.program
    (path / "program").mkdir(parents=True)
    bundle.extract(path / "program")
    methods: list[dict[str, Any]] = []
    for method in bundle.methods:
        cases = []
        for number, case in enumerate(method.cases):
            # The numbers keep paths unique, because make_safe_name may map different names to the same text.
            place = f"{make_safe_name(method.name)}-{len(methods)}/{number}-{make_safe_name(case.name)}"
            (path / place).mkdir(parents=True)
            for kind, tensors in (("input", case.inputs), ("output", case.expected_outputs)):
                for position, array in enumerate(tensors.values()):
                    save_npy(path / place / f"{kind}_{position}.npy", array)
            fields = {name: getattr(case, name) for name in ("name", "source", "rtol", "atol")}
            for position, array in enumerate(case.noise.values()):
                save_npy(path / place / f"noise_{position}.npy", array)
            noise = {"noise": list(case.noise)} if case.noise else {}
            extra = {
                **noise,
                **accept_json(case.accept),
                **encode_relation(case.relation),
                **encode_controls(case.control),
            }
            cases.append({**fields, **extra, "folder": place})
        specs = {kind: encode_signature(getattr(method.signature, kind)) for kind in ("inputs", "outputs")}
        methods.append({"name": method.name, **specs, "cases": cases})
    document = {
        "golden": _VERSION,
        **{name: getattr(program, name) for name in ("runtime", "main", "compiler", "flags")},
        "files": sorted(program.files),
        "methods": methods,
        "made": dict(bundle.made),
    }
    (path / GOLDEN_INDEX).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def read_golden(path: Path, *, context: RunContext) -> Bundle:
    """Read a bundle from a golden directory. The content is untrusted."""
    index = resolve_within(path, path / GOLDEN_INDEX)
    try:
        document = parse_json(read_file(index, _MAX_INDEX_BYTES))
    except OSError as error:
        hint = f"a golden directory contains {GOLDEN_INDEX}"
        raise UsageError(f"{index} cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{index}: invalid JSON: {error}") from error
    kinds = {"golden": int, "runtime": str, "main": str, "files": list, "compiler": str, "flags": list}
    version, runtime, main, names, compiler, flags, methods, made = take(
        document, GOLDEN_INDEX, **kinds, methods=list, made=dict
    )
    if version != _VERSION:
        raise UsageError(f"{index}: unsupported version {version}: this hil reads version {_VERSION}")
    if not all(isinstance(text, str) for text in (*names, *flags)):
        raise UsageError(f"{index}: file names and flags must be strings")
    files = {
        check_file_name(name, f"{GOLDEN_INDEX}: files"): resolve_within(path, path / "program" / name) for name in names
    }
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise UsageError(f"{path / 'program'}: missing file {missing[0]!r}")
    if main not in files:
        raise UsageError(f"{index}: main file {main[:80]!r} is missing from 'files'")
    suites, signatures = [], {}
    for number, item in enumerate(methods):
        where = f"{GOLDEN_INDEX}: methods[{number}]"
        name, inputs, outputs, cases = take(item, where, name=str, inputs=list, outputs=list, cases=list)
        signatures[name_of(name, where)] = signature = Signature(
            parse_specs(inputs, where), parse_specs(outputs, where)
        )
        suites.append(
            MethodTestSuite(
                name, [_read_case(path, one, signature, f"{where}.cases[{place}]") for place, one in enumerate(cases)]
            )
        )
    artifact = make_program(
        runtime, files, main, function=next(iter(signatures), ""), compiler=compiler, flags=tuple(flags)
    )
    return Bundle.create(artifact, suites, signatures=signatures, made=made)


def _read_case(path: Path, item: Any, signature: Signature, where: str) -> MethodTestCase:
    number = (float, int, type(None))
    item, noisy = take_noise(item, where)
    item, accept = take_accept(item, where)
    item, relation = take_relation(item, where)
    item, control = take_controls(item, where)
    fields: dict[str, Any] = {"name": str, "source": str, "rtol": number, "atol": number}
    name, source, rtol, atol, folder = take(item, where, **fields, folder=str)
    place = resolve_within(path, path / check_file_name(folder, where))
    if not place.is_dir():
        raise UsageError(f"{place} is not a directory")
    noise = {
        name_of(output, f"{where}.noise") if isinstance(output, str) else "": load_npy(
            resolve_within(path, place / f"noise_{position}.npy"), NOISE_DTYPE
        )
        for position, output in enumerate(noisy)
    }
    return replace(
        read_case(place, signature, name=name),
        source=source,
        rtol=rtol,
        atol=atol,
        noise=noise,
        accept=accept,
        relation=relation,
        control=control,
    )
