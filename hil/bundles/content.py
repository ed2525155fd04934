"""A bundle's content as a manifest and blobs, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from types import MappingProxyType
from typing import Any

from hil.bundles import layout, manifest
from hil.bundles.cases import Method, MethodTestCase, Program, Signature
from hil.bundles.checks import checked_cases
from hil.core.digest import digest_of
from hil.core.results import Noise
from hil.core.tensors import Array, dtype_name, to_bytes


def blob_table(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Digest and size of every blob, of a manifest.

    Raises:
        UsageError: it says what cannot be.
    """
    return manifest.table_of(_parts(document)[-1], layout.MAX_BLOBS)


def program_files(document: Mapping[str, Any]) -> tuple[dict[str, str], str, str, list[str]]:
    """Of a manifest: the program's files (name -> digest), its main file, its runtime, and the names of its methods.

    Raises:
        UsageError: it says what cannot be.
    """
    program, methods, _, _ = _parts(document)
    runtime, main, files, _, _ = _program_parts(program)
    digests: dict[str, str] = {}
    for number, item in enumerate(manifest.items(files, "program.files", manifest.MAX_FILES)):
        where = f"program.files[{number}]"
        name, blob = manifest.take(item, where, name=str, blob=str)
        digests[manifest.file_name(name, where)] = blob
    if len(digests) != len(files):
        raise manifest.refused("program.files", "has one name twice")
    manifest.file_names(list(digests), "program.files")
    if main not in digests:
        raise manifest.refused("program.main", "is none of its files")
    names = [str(item.get("name")) if isinstance(item, dict) else "" for item in methods]
    return digests, main, runtime, names


def _parts(document: Mapping[str, Any]) -> list[Any]:
    return manifest.take(document, "it", program=dict, methods=list, made=dict, blobs=list)


def _program_parts(value: Any) -> list[Any]:
    return manifest.take(value, "program", runtime=str, main=str, files=list, compiler=str, flags=list)


def to_document(
    program: Program, methods: Sequence[Method], made: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The manifest, and the blobs that it names in the order in which it does; equal ones are one."""
    blobs: dict[str, memoryview] = {}

    def blob(data: memoryview) -> str:
        digest = digest_of(data)
        blobs.setdefault(digest, data)
        return digest

    def tensors(given: Mapping[str, Array]) -> list[dict[str, Any]]:
        return [
            {"name": name, "dtype": dtype_name(array.dtype), "shape": list(array.shape), "blob": blob(to_bytes(array))}
            for name, array in given.items()
        ]

    manifest.check_made(made)
    document = {
        "program": {
            "runtime": program.runtime,
            "main": program.main,
            "files": [{"name": name, "blob": blob(data)} for name, data in program.files.items()],
            "compiler": program.compiler,
            "flags": list(program.flags),
        },
        "methods": [
            {
                "name": method.name,
                "inputs": manifest.signature_json(method.signature.inputs),
                "outputs": manifest.signature_json(method.signature.outputs),
                "cases": [
                    {
                        "name": case.name,
                        "source": case.source,
                        "rtol": case.rtol,
                        "atol": case.atol,
                        "inputs": tensors(case.inputs),
                        "outputs": tensors(case.expected_outputs),
                        **noise_json(case.noise),
                    }
                    for case in method.cases
                ],
            }
            for method in methods
        ],
        "made": dict(made),
    }
    return {**document, "blobs": [{"digest": key, "size": data.nbytes} for key, data in blobs.items()]}, blobs


def from_document(
    document: Mapping[str, Any], blobs: Mapping[str, memoryview]
) -> tuple[Program, tuple[Method, ...], dict[str, Any]]:
    """The program, its methods and how they were made, of a manifest and its blobs.

    Raises:
        UsageError: the manifest says what cannot be, or a case does not fit its method.
    """
    program, methods, made, _ = _parts(document)
    digests, main, runtime, _ = program_files(document)
    _, _, _, compiler, flags = _program_parts(program)
    for number, flag in enumerate(manifest.items(flags, "program.flags", manifest.MAX_TENSORS)):
        if not isinstance(flag, str):
            raise manifest.refused(f"program.flags[{number}]", "is of the wrong type")
        manifest.name_of(flag, f"program.flags[{number}]", most=manifest.MAX_TEXT, empty=True)
    manifest.check_made(made)
    files = {name: manifest.blob_of(blob, blobs, f"program file {name!r}") for name, blob in digests.items()}
    read = [
        _read_method(item, blobs, f"methods[{number}]")
        for number, item in enumerate(manifest.items(methods, "methods", manifest.MAX_METHODS))
    ]
    if not read or len({method.name for method in read}) != len(read):
        raise manifest.refused("methods", "is empty or has one name twice")
    _check_all_named(document, blobs)
    content = Program(
        manifest.runtime_name(runtime),
        main,
        MappingProxyType(files),
        manifest.name_of(compiler, "program.compiler", most=manifest.MAX_TEXT, empty=True),
        tuple(flags),
    )
    return content, tuple(read), made


def _read_method(value: Any, blobs: Mapping[str, memoryview], where: str) -> Method:
    name, inputs, outputs, cases = manifest.take(value, where, name=str, inputs=list, outputs=list, cases=list)
    signature = Signature(manifest.specs_of(inputs, f"{where}.inputs"), manifest.specs_of(outputs, f"{where}.outputs"))
    manifest.name_of(name, f"{where}.name")
    given = [
        _read_case(item, blobs, f"{where}.cases[{number}]")
        for number, item in enumerate(manifest.items(cases, f"{where}.cases", manifest.MAX_CASES))
    ]
    return Method(name, signature, checked_cases(name, signature, given))


def _read_case(value: Any, blobs: Mapping[str, memoryview], where: str) -> MethodTestCase:
    number = (float, type(None))
    value, noise = take_noise(value, where)
    fields: dict[str, Any] = {"name": str, "source": str, "rtol": number, "atol": number, "inputs": list}
    name, source, rtol, atol, inputs, outputs = manifest.take(value, where, **fields, outputs=list)
    return MethodTestCase(
        _read_tensors(inputs, blobs, f"{where}.inputs"),
        _read_tensors(outputs, blobs, f"{where}.outputs"),
        rtol,
        atol,
        manifest.name_of(name, f"{where}.name"),
        manifest.name_of(source, f"{where}.source", most=manifest.MAX_TEXT, empty=True),
        noise,
    )


def noise_json(noise: Mapping[str, Noise]) -> dict[str, Any]:
    """The field of a case that holds its noise; none where there is none."""
    return {"noise": {name: list(astuple(one)) for name, one in noise.items()}} if noise else {}


def take_noise(value: Any, where: str) -> tuple[Any, dict[str, Noise]]:
    """A case's fields without its noise, and the noise as :func:`noise_json` wrote it.

    Raises:
        UsageError: it is damaged.
    """
    if not isinstance(value, dict) or not value.get("noise"):
        return value, {}
    where, given = f"{where}.noise", value["noise"]
    if not isinstance(given, dict):
        raise manifest.refused(where, "is of the wrong type")
    manifest.items(list(given), where, manifest.MAX_TENSORS)
    for name, numbers in given.items():
        fine = isinstance(numbers, list) and len(numbers) == 3 and all(isinstance(one, float) for one in numbers)
        if not fine or not all(0 <= one < math.inf for one in numbers):
            raise manifest.refused(f"{where}.{name}", "must be three numbers of 0 or more")
    rest = {key: one for key, one in value.items() if key != "noise"}
    return rest, {name: Noise(*numbers) for name, numbers in given.items()}


def _read_tensors(given: Sequence[Any], blobs: Mapping[str, memoryview], where: str) -> dict[str, Array]:
    found = [
        manifest.tensor_of(item, blobs, f"{where}[{place}]")
        for place, item in enumerate(manifest.items(given, where, manifest.MAX_TENSORS))
    ]
    if len(dict(found)) != len(found):
        raise manifest.refused(where, "has two tensors of one name")
    return dict(found)


def _check_all_named(document: Mapping[str, Any], blobs: Mapping[str, memoryview]) -> None:
    """Refuse blobs that nothing names: what nobody reads nobody would miss either."""
    tensors = (
        tensor["blob"]
        for method in document["methods"]
        for case in method["cases"]
        for kind in ("inputs", "outputs")
        for tensor in case[kind]
    )
    named = {item["blob"] for item in document["program"]["files"]} | set(tensors)
    if set(blobs) - named:
        raise manifest.refused("blobs", "has one that nothing names")
