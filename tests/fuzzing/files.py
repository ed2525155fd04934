"""Fuzzers of the files that hil reads: bundles, models, tensors."""

from __future__ import annotations

import contextlib
import io
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fuzzing import mutate
from fuzzing.engine import ROOT, Attempt, Broken, Fuzzer, Tried
from hil.errors import HilError, ImportFailed, UsageError

_SMALL = 1 << 17


def reader(name: str, read: Callable[[Path], object]) -> Callable[[Path], contextlib.AbstractContextManager[Attempt]]:
    """Tries an input by writing it to a file of this name, and reading that."""

    @contextlib.contextmanager
    def opened(folder: Path) -> Iterator[Attempt]:
        def attempt(data: bytes) -> Tried | None:
            # Mapped files must not change under what reads them: each gets a new one.
            path = folder / name
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            found = read(path)
            return found if isinstance(found, Tried) else None

        yield attempt

    return opened


def imported(name: str) -> Callable[[Path, bytes], None]:
    """Tries an input as ``hil run`` does: read as a model, in a process of its own."""

    def confirm(folder: Path, data: bytes) -> None:
        from hil.controller.models.importers import import_model

        (folder / name).write_bytes(data)
        import_model(folder / name)

    return confirm


def described(describe: Callable[..., dict[str, Any]]) -> Callable[[Path], None]:
    """Reads a model as the process that imports it does, and then as the one that asked."""

    def read(path: Path) -> None:
        import json

        from hil.controller.models.importers import _make_specs, _resolve_external
        from hil.core.tensors import check_names
        from hil.errors import LoadFailed

        found = json.loads(json.dumps(describe(str(path), "", {})))
        with contextlib.suppress(LoadFailed):  # which import_model makes an ImportFailed
            check_names(_make_specs(found["inputs"]) or (), _make_specs(found["outputs"]) or ())
        for file in found["external"]:
            _resolve_external(path, file)
        {key: (float(low), float(high)) for key, (low, high) in found["ranges"].items()}

    return read


def small_files(*patterns: str) -> list[bytes]:
    """The small files of the checkout that these patterns name."""
    found = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return [path.read_bytes() for path in found if path.stat().st_size <= _SMALL]


# ---- .hilb


def bundles() -> list[bytes]:
    from support import bundle_files

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made = bundle_files.bundle(folder)
        made.save(folder / "a.hilb")
        plain = (folder / "a.hilb").read_bytes()
        head = bundle_files.forged(made, lambda document: document["methods"][0]["cases"].pop())
        bundle_files.bundle(folder, bundle_files.case(6, control=bundle_files.control(6))).save(folder / "b.hilb")
        controlled = (folder / "b.hilb").read_bytes()
    return [plain, head, controlled]


def change_bundle(data: bytes, rng: Random) -> bytes:
    """Change a bundle's manifest or a blob of it, and set right what follows from that; or its bytes."""
    import json

    from hil.bundles.layout import HEADER_BYTES, Head, align_offset, encode_canonical_json
    from hil.core.digest import digest_of

    if rng.random() < 0.25:
        return mutate.havoc(data, rng)
    try:
        _, _, size, count = struct.unpack_from("<IIQQ", data, 8)
        document = json.loads(data[HEADER_BYTES : HEADER_BYTES + count])
        at, blobs = align_offset(HEADER_BYTES + count), []
        for item in document["blobs"][:100]:
            blobs.append(data[at : at + item["size"]])
            at += align_offset(item["size"])
    except (ValueError, KeyError, TypeError, struct.error, RecursionError):
        return mutate.havoc(data, rng)
    if rng.random() < 0.3 and blobs:
        number = rng.randrange(len(blobs))
        blobs[number] = mutate.havoc(blobs[number], rng)
        entry, new = document["blobs"][number], digest_of(blobs[number])
        with contextlib.suppress(ValueError, KeyError):
            document = json.loads(json.dumps(document).replace(json.dumps(entry["digest"]), f'"{new}"'))
            document["blobs"][number]["size"] = len(blobs[number])
    if rng.random() < 0.8:
        document = mutate.tree(document, rng)
    try:
        text = encode_canonical_json(document)
    except (ValueError, TypeError, RecursionError):
        text = mutate.json_bytes(data[HEADER_BYTES : HEADER_BYTES + count], rng)
    size = align_offset(HEADER_BYTES + len(text)) + sum(align_offset(len(blob)) for blob in blobs)
    return Head(size, text).to_bytes() + b"".join(blob.ljust(align_offset(len(blob)), b"\0") for blob in blobs)


def _read_bundle(path: Path) -> None:
    from support import bundle_files

    from hil.bundles import Bundle
    from hil.bundles.signature import verify
    from hil.controller.workloads.bundles.show import describe_bundle

    bundle = Bundle.open(path)
    describe_bundle(bundle, path)
    bundle_files.judge_controls(bundle)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        before = sorted(path.parent.iterdir())
        bundle.extract(Path(place))
        if sorted(path.parent.iterdir()) != before:
            raise Broken("extracting wrote outside its folder")
    verify(bundle.head)


# ---- .pte, .bpte


def _executorch() -> list[bytes]:
    from support.executorch_crafted import bundled

    linear = (ROOT / "tests/unit/executorch_files/linear.pte").read_bytes()
    return [*small_files("tests/unit/executorch_files/*"), bytes(bundled([[2, 3], [4]], linear))]


def _read_executorch(path: Path) -> None:
    from hil.controller.models.importers.programs import describe_pte
    from hil.controller.workloads.bundles.bpte import read_bpte

    described(describe_pte)(path)
    read_bpte(path, context=None)


def _read_cases(path: Path) -> None:
    from hil.controller.workloads.bundles.bpte import read_bpte

    with contextlib.suppress(HilError):
        _read_executorch(path)
    read_bpte(path, context=None)


# ---- .onnx


def _models() -> list[bytes]:
    import onnx

    nodes = Path(onnx.__file__).parent / "backend/test/data"
    own = sorted(nodes.glob("*/*/model.onnx"))[::7]
    return [
        *small_files("examples/digits/*.onnx", "examples/*/*.onnx"),
        *(one.read_bytes() for one in own if one.stat().st_size < 1 << 14),
    ][:400]


def _onnx(data: bytes, rng: Random) -> bytes:
    import onnx

    return mutate.of_message(onnx.ModelProto)(data, rng)


def _read_onnx(path: Path) -> None:
    from hil.controller.models.importers.onnx import describe

    described(describe)(path)


# ---- .tflite


def _read_tflite(path: Path) -> None:
    from hil.controller.models.importers.programs import describe_tflite

    described(describe_tflite)(path)


def _lacking_litert() -> str:
    import importlib.util

    return "" if importlib.util.find_spec("ai_edge_litert") else "ai-edge-litert is not installed"


# ---- .npy, .npz, .pb


def _tensors() -> list[bytes]:
    import onnx.numpy_helper

    found = []
    for array in (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.int64),
        np.array(["a", "bc"]),
        np.array(1.5),
        np.asfortranarray(np.ones((2, 2), np.complex128)),
        np.zeros(3, "V2"),
    ):
        held = io.BytesIO()
        np.save(held, array, allow_pickle=False)
        found.append(held.getvalue())
    held = io.BytesIO()
    np.savez(held, x=np.ones(3), y=np.zeros((2, 2), np.int8))
    packed = io.BytesIO()
    np.savez_compressed(packed, arr_0=np.ones(1000, np.float32))
    tensor = onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "x").SerializeToString()
    return [*found, held.getvalue(), packed.getvalue(), tensor]


_HEADER = re.compile(rb"\{.*?\}", re.S)


def _npy(data: bytes, rng: Random) -> bytes:
    """Change a header's text, with its length set right; or bytes."""
    if not data.startswith(b"\x93NUMPY") or rng.random() < 0.4:
        return mutate.havoc(data, rng)
    header = _HEADER.search(data[:2000])
    if header is None:
        return mutate.havoc(data, rng)
    odd = [
        str(rng.choice(mutate.INTEGERS)).encode(),
        b"-1",
        b"'O'",
        b"'<U999999999'",
        b"(" * 3000,
        b"9" * 6000,
        b"[]*9",
        b"'|V0'",
        b"'<M8[ns]'",
        b"[('a','<f4')]",
        b"None",
        b"1e9",
        b"()",
        b"(1,)*64",
        b"'<f1'",
    ]
    text = header[0]
    spots = list(re.finditer(rb"\d+|'[^']*'|True|False|\(.*?\)", text))
    if spots:
        spot = rng.choice(spots)
        text = text[: spot.start()] + rng.choice(odd) + text[spot.end() :]
    text = (text + b"\n").ljust(-(-(len(text) + 11) // 64) * 64 - 10)
    form, version = ("<H", 1) if len(text) < 65536 else ("<I", 2)
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack(form, len(text)) + text + data[header.end() + 1 :]


def _tensor(data: bytes, rng: Random) -> bytes:
    import onnx

    if data.startswith(b"PK"):
        return mutate.archive(data, rng, _npy)
    if data.startswith(b"\x93"):
        return _npy(data, rng)
    return mutate.of_message(onnx.TensorProto)(data, rng)


def _read_tensor(path: Path) -> None:
    """Read what a user gives as an input, for a tensor of any kind, under the name that its beginning suggests."""
    from hil.controller.models.inputs import make_inputs
    from hil.core.tensors import TensorSpec

    with path.open("rb") as file:
        head = file.read(2)
    suffix = {b"PK": ".npz", b"\x93N": ".npy"}.get(head, ".pb")
    named = path.rename(path.with_suffix(suffix))
    try:
        specs = [TensorSpec("x", "float32", (None, 3)), TensorSpec("y", "bfloat16", (3,))]
        make_inputs(specs, [str(named) if suffix == ".npz" else f"x={named}"])
    finally:
        named.unlink()


# ---- ETDump


def _read_etdump(path: Path) -> Tried:
    from hil.controller.analysis.profile.runtimes.etdump_profile import profile_of

    profile = profile_of(path, model="m", board="sim")
    for row in profile.rows:
        str(row)
    # What the reader refuses ends at few places: what it takes tells inputs from one another.
    counts = (len(profile.rows), sum(len(call.iterations_ns) for call in profile.calls))
    return Tried(kinds=(f"{counts}", *sorted({row.kind for row in profile.rows})))


# ---- .vmfb, .mlir


def _read_vmfb(path: Path) -> None:
    from hil.controller.models.importers.programs import describe_vmfb

    described(describe_vmfb)(path)


def _programs() -> list[bytes]:
    """A program as IREE compiles it."""
    from iree.compiler import compile_str

    source = "func.func @main(%a: tensor<4xf32>, %n: tensor<?xi8>) -> tensor<4xf32> { return %a : tensor<4xf32> }"
    return [compile_str(source, target_backends=["vmvx"])]


def _read_mlir(path: Path) -> None:
    from hil.controller.models.importers.mlir import describe

    described(describe)(path)


_MLIR = b"""module {
  func.func @main(%a: tensor<4x?xf32> {iree.abi.name = "x"}, %b: tensor<2xi8>) -> (tensor<4x?xf32>, i32) {
    %c = arith.constant 7 : i32
    return %a, %c : tensor<4x?xf32>, i32
  }
  func.func private @other(%a: tensor<f64>) -> tensor<f64> { return %a : tensor<f64> }
}
"""
_MLIR_WORDS = [
    b"tensor<*xf32>",
    b"tensor<4xcomplex<f32>>",
    b"!torch.vtensor<[2,?],f32>",
    b"memref<2xf32>",
    b"vector<2xf32>",
    b"tensor<0x0x9223372036854775807xf32>",
    b"index",
    b"i1",
    b"f8E4M3FN",
    b"private",
    b"{}",
    b"none",
]


def model_fuzzer(
    name: str,
    about: str,
    file: str,
    read: Callable[[Path], None],
    seeds: Callable[[], Sequence[bytes]],
    change: Callable[[bytes, Random], bytes],
    **more: Any,
) -> Fuzzer:
    """Models are read in a process of their own: an end of that is an error of the model's."""
    return Fuzzer(name, about, reader(file, read), seeds, change, (ImportFailed, UsageError), imported(file), **more)


FUZZERS = [
    Fuzzer("bundles", "bundles, .hilb", reader("a.hilb", _read_bundle), bundles, change_bundle),
    model_fuzzer(
        "executorch",
        "ExecuTorch's programs and their cases, .pte and .bpte",
        "a.bpte",
        _read_cases,
        _executorch,
        mutate.havoc,
    ),
    model_fuzzer("onnx", "models, .onnx", "a.onnx", _read_onnx, _models, _onnx, limit_mib=1200),
    model_fuzzer(
        "tflite",
        "models, .tflite",
        "a.tflite",
        _read_tflite,
        lambda: small_files("examples/tflite/*.tflite"),
        mutate.havoc,
        lacking=_lacking_litert,
    ),
    model_fuzzer("vmfb", "programs of IREE, .vmfb", "a.vmfb", _read_vmfb, _programs, mutate.havoc),
    model_fuzzer(
        "mlir",
        "models, .mlir",
        "a.mlir",
        _read_mlir,
        lambda: [_MLIR],
        lambda data, rng: mutate.lines(data, rng, _MLIR_WORDS),
    ),
    Fuzzer(
        "etdump",
        "profiles of ExecuTorch, ETDump",
        reader("a.etdp", _read_etdump),
        lambda: small_files("tests/unit/executorch_files/*.etdp"),
        mutate.havoc,
    ),
    Fuzzer("tensors", "tensors that users give: .npy, .npz, .pb", reader("a.bin", _read_tensor), _tensors, _tensor),
]
