"""Make the inputs for running or calibrating a model: validated tensors from the user, and seeded random tensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.storage.paths import make_sibling_path, path_exists
from hil.controller.storage.tensor_files import load_npz, load_pb
from hil.core.digest import digest_of
from hil.core.files import MAX_FILE_BYTES, read_file
from hil.core.npy import Fits, Npz, is_raw, load_npy, restore_dtype
from hil.core.results import Model
from hil.core.tensors import (
    SUB_BYTE_BITS,
    Array,
    TensorSpec,
    count_bytes,
    from_bytes,
    get_dtype_name,
    get_float_limits,
    parse_dtype,
    to_bytes,
    type_text,
    unpack,
)
from hil.errors import UsageError, did_you_mean
from hil.formats.iree_values import parse_mlir_dtype

_IREE_FORM = re.compile(r"(?P<dims>(?:\d{1,18}x)*)(?P<type>[a-z][A-Za-z0-9]*(?:<f\d+>)?)(?:=(?P<value>.*))?$", re.S)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?$")
# Model formats that hil compiles or converts for fixed sizes.
_COMPILED_FORMATS = ("onnx", "mlir", "pt2", "tf", "keras")
# End of the file next to the model with calibration samples: net.calibration.npz for net.onnx.
CALIBRATION = ".calibration.npz"
_FORMS = "NAME=x.npy, NAME=x.npz:key, x.npz, NAME=test.pb, 4x8xf32=@x.bin, 4x8xf32=1 2 3"


def make_inputs(
    specs: Sequence[TensorSpec],
    given: Mapping[str, Array] | Sequence[str],
    *,
    seed: int = 0,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    user_range: tuple[float, float] | None = None,
    dims: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """Return all inputs for a model, in order: the given tensors, and random tensors for the rest.

    Args:
        specs: the model's inputs.
        given: name -> tensor, or texts of ``--input`` (:func:`parse_input`).
        seed: seed of random tensors; the same seed and name give the same tensor on every machine.
        ranges: input -> (low, high) from the model.
        user_range: (low, high) for all random numbers; overrides ``ranges``.
        dims: sizes for symbolic dimensions. The shapes of given tensors also set sizes.

    Raises:
        UsageError: a tensor's name, dtype or shape does not match the model, there are too many tensors, or a dimension
            has no size.
    """
    sizes = dict(dims or {})
    by_name = {spec.name: spec for spec in specs}
    if isinstance(given, Mapping):
        chosen = {name: as_array(f"input {name!r}", value, by_name.get(name)) for name, value in given.items()}
    else:
        chosen = {}
        for text in given:
            # Only pass inputs that have no tensor yet, so that each input gets one tensor.
            chosen |= parse_input(text, [spec for spec in specs if spec.name not in chosen], strict=True)
    for name, array in chosen.items():
        if name not in by_name:
            raise UsageError(f"the model has no input {name!r}", hint=_format_signature(specs, name))
        refuse_misfit(by_name[name], array)
        _bind(by_name[name], array.shape, sizes)
    if unknown := [spec for spec in specs if not spec.dtype and spec.name not in chosen]:
        raise UsageError(
            f"missing input {unknown[0].name!r}: the program does not specify the dtype and shape",
            hint="pass --input for every input, in order: x.npy, 4x8xf32=@x.bin or 4x8xf32=1 2 3",
            option="--input",
        )
    missing = [spec for spec in specs if spec.name not in chosen]
    _refuse_open(missing, sizes)
    for spec in missing:
        shape = [dim if isinstance(dim, int) else sizes[str(dim)] for dim in spec.shape]
        bounds = user_range or (ranges or {}).get(spec.name)
        chosen[spec.name] = make_random_tensor(spec, shape, seed=seed, bounds=bounds)
    return {spec.name: chosen[spec.name] for spec in specs}


def fix_sizes(model: Model, inputs: Mapping[str, Array]) -> Model:
    """Return the model with sizes from the inputs' shapes, so that it is compiled for these sizes.

    Compiled programs are returned unchanged.
    """
    if model.format not in _COMPILED_FORMATS or model.inputs is None:
        return model
    # In exported programs, a dimension may be an expression of other dimensions. Such a dimension cannot be set.
    free = model.producer["dims"] if model.format == "pt2" else None
    sizes = dict(model.dims)
    for spec in model.inputs:
        for dim, size in zip(spec.shape, inputs[spec.name].shape, strict=True):
            if isinstance(dim, str) and (free is None or dim in free):
                sizes[dim] = size
    specs = (replace(spec, shape=inputs[spec.name].shape) for spec in model.inputs)
    return model if sizes == model.dims else replace(model, dims=sizes, inputs=tuple(specs))


def parse_input(text: str, specs: Sequence[TensorSpec], *, strict: bool = False) -> dict[str, Array]:
    """Parse an ``--input`` or ``--expected`` text. Return the tensors by name.

    Forms: ``NAME=x.npy``, ``NAME=x.npz:key``, ``NAME=test.pb`` (an ONNX TensorProto), ``x.npz`` (every key is an
    input), ``x.npy`` or ``@x.npy`` (the next input), and the forms of iree-run-module: ``4x8xf32=@x.bin``, ``4x8xf32=1
    2 3``, ``4x8xf32=2`` (all equal), ``4x8xf32`` (all zero), ``7`` (a scalar). The forms of iree-run-module may also
    follow ``NAME=``.

    Args:
        text: the option's value.
        specs: inputs (or outputs) that have no tensor yet, in order.
        strict: reject a mismatch in dtype or shape before allocating memory.

    Raises:
        UsageError: the text is invalid, the input does not exist, or the file is unreadable.
    """
    by_name = {spec.name: spec for spec in specs}
    # Try the longest name first: a name may contain an equals sign or look like a type.
    for name in sorted(by_name, key=len, reverse=True):
        if text.startswith(f"{name}="):
            return {name: _parse_value(text[len(name) + 1 :], by_name[name], strict)}
    if text.endswith(".npz"):
        return _read_npz(Path(text.removeprefix("@")), specs, strict)
    form = _IREE_FORM.match(text)
    name, equals, _ = text.partition("=")
    # The text starts with a name, not with a type, file or number.
    if equals and not text.startswith("@") and not (form and parse_mlir_dtype(form["type"])):
        raise UsageError(f"unknown or duplicate tensor {name!r}", hint=_format_signature(specs, name))
    if not specs:
        raise UsageError(f"unexpected tensor value {text[:80]!r}: every tensor of the model already has a value")
    return {specs[0].name: _parse_value(text, specs[0], strict)}


def as_array(what: str, value: Any, spec: TensorSpec | None = None) -> Array:
    """Convert a value from the user to an array. Raw bytes, such as bfloat16 in a .npz file, get the spec's dtype.

    Raises:
        UsageError: the value is not an array, or has an unsupported dtype.
    """
    try:
        array = np.asarray(value)
    except Exception as error:  # a ragged list or a tensor on a GPU, for example: exception types vary
        raise UsageError(f"cannot convert {what} to an array: {error}", hint="pass a numpy array") from error
    if array.dtype.kind == "U":
        array = array.astype(object)
    elif spec is not None and spec.dtype:
        array = restore_dtype(array, spec.dtype)
    try:
        get_dtype_name(array.dtype)
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", hint=error.hint) from error
    return array


def refuse_misfit(spec: TensorSpec, array: Array) -> None:
    """Raise UsageError if a tensor does not match an input's dtype or shape."""
    _refuse_misfit(spec, get_dtype_name(array.dtype), array.shape)


def _refuse_misfit(spec: TensorSpec, found: str, shape: Sequence[int]) -> None:
    if not spec.accepts(found, shape):
        raise UsageError(
            f"input {spec.name!r}: expected {type_text(spec.dtype, spec.shape)}, got {type_text(found, shape)}",
            hint="hil does not convert inputs: save the tensor with the expected dtype and shape",
        )


def make_spec_check(spec: TensorSpec, strict: bool) -> Fits:
    """Return a function that checks if an array in a file matches a spec exactly.

    With ``strict``, a mismatch raises UsageError.
    """

    def fits(found: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        name = spec.dtype if is_raw(found, spec.dtype) else get_dtype_name(found)
        if strict:
            _refuse_misfit(spec, name, shape)
        return bool(spec.dtype) and spec.is_static and spec.accepts(name, shape)

    return fits


def _bind(spec: TensorSpec, shape: Sequence[int], sizes: dict[str, int]) -> None:
    """Set sizes for symbolic dimensions from a tensor's shape."""
    for dim, size in zip(spec.shape, shape, strict=bool(spec.dtype)):
        if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
            raise UsageError(f"input {spec.name!r} has size {size} for dimension {dim!r}, expected {sizes[dim]}")


class OpenDimensions(UsageError):
    """Raised for dimensions without a size from the user or from a given tensor."""

    def __init__(self, message: str, needs: Sequence[str]) -> None:
        super().__init__(message, option="--input" if any(need.startswith("--input") for need in needs) else "")
        self._needs = needs  # symbols, or `--input NAME=x.npy` for a dimension without a symbol
        self.suggest({})

    def suggest(self, sizes: Mapping[str, int], path: Path | None = None) -> None:
        """Add suggested sizes to the hint. Unknown sizes are 1.

        Args:
            path: the model's file, to add the table of hil.toml. Tests of many models need a size per model.
        """
        texts = {need: "" if need.startswith("--") else f"{need}={sizes.get(need, 1)}" for need in self._needs}
        self.hint = " ".join(f"--dim {text}" if text else need for need, text in texts.items())
        if path is not None and all(texts.values()):
            name, dims = (json.dumps(one, ensure_ascii=False) for one in (escape(path.name), list(texts.values())))
            self.hint += f", or in hil.toml: [models.{name}] dims = {dims}"


def _refuse_open(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
    """Raise OpenDimensions for all dynamic dimensions together."""
    texts: list[str] = []
    needs: dict[str, None] = {}
    for spec in specs:
        open_dims = [dim for dim in spec.shape if not isinstance(dim, int) and not (dim and dim in sizes)]
        if open_dims:
            texts.append(f"input {spec.name!r} is {type_text(spec.dtype, spec.shape)}")
            needs |= dict.fromkeys(dim or f"--input {spec.name}=x.npy" for dim in open_dims)
    if needs:
        names = [need for need in needs if not need.startswith("--")]
        what = f"dimension{'s' * (len(names) > 1)} {' and '.join(map(repr, names))}" if names else "a dimension"
        raise OpenDimensions(f"{', '.join(texts)}: missing size for {what}", list(needs))


def _format_signature(specs: Sequence[TensorSpec], name: str = "") -> str:
    """Return the hint with the expected tensors, and the names that are similar to ``name``."""
    if not specs:
        return "expected tensors: none"
    if not specs[0].dtype:
        return "only the board knows the names: pass the files in order, without names"
    similar = did_you_mean(name, [spec.name for spec in specs]) if name else ""
    return f"{similar}expected tensors: {', '.join(map(str, specs[:10]))}{', ...' if len(specs) > 10 else ''}"


def _parse_value(text: str, spec: TensorSpec, strict: bool) -> Array:
    form = _IREE_FORM.match(text)
    if form and parse_mlir_dtype(form["type"]):
        return _parse_iree_value(form, spec, strict)
    if _NUMBER.match(text) and not path_exists(text):
        if not spec.dtype:
            raise UsageError(f"missing type of {text[:80]!r} for tensor {spec.name!r}", hint=f"f32={text[:80]}")
        return _parse_elements(text, spec.dtype, (), spec)
    file, _, key = text.removeprefix("@").partition(".npz:")
    path = Path(f"{file}.npz" if key else file)
    if path.suffix == ".npz":
        with Npz(path) as archive:
            if not key and len(archive.keys) > 1:
                raise UsageError(f"{path} has several arrays", hint=f"choose one: {path}:{archive.keys[0]}")
            key = key or next(iter(archive.keys), "key")
            if key not in archive.keys:
                raise UsageError(
                    f"{path} has no array {key!r}",
                    hint=f"{did_you_mean(key, archive.keys)}arrays: {', '.join(archive.keys[:20]) or 'none'}",
                )
            return restore_dtype(archive.read(key, make_spec_check(spec, strict)), spec.dtype)
    if path.suffix == ".npy":
        return load_npy(path, spec.dtype, fits=make_spec_check(spec, strict))
    if path.suffix == ".pb":
        return load_pb(path)
    raise UsageError(f"invalid tensor value {text[:80]!r}", hint=f"expected one of {_FORMS}")


def _parse_iree_value(form: re.Match[str], spec: TensorSpec, strict: bool) -> Array:
    shape = tuple(int(size) for size in form["dims"].split("x") if size)
    name = parse_mlir_dtype(form["type"]) or ""
    # In iree-run-module, i8 has no sign and may also be bool. The model's input determines the dtype.
    if (form["type"].startswith("i") and spec.dtype == f"u{name}") or (name, spec.dtype) == ("int8", "bool"):
        name = spec.dtype
    value = form["value"]
    if strict and not (value or "").startswith("@"):
        _refuse_misfit(spec, name, shape)
    if value is None:
        return _make_zeros(shape, name)
    if not value.startswith("@"):
        return _parse_elements(value, name, shape, spec)
    path = Path(value[1:])
    if path.suffix == ".npy":
        return load_npy(path, name, fits=make_spec_check(spec, strict))
    try:
        # Read only as many bytes as the tensor needs, except for strings of unknown length.
        data = read_file(path, MAX_FILE_BYTES if name == "string" else count_bytes(name, shape))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if name in SUB_BYTE_BITS and len(data) == -(-math.prod(shape) * SUB_BYTE_BITS[name] // 8):
        return unpack(np.frombuffer(data, np.uint8), name, shape)
    try:
        return from_bytes(data, name, shape)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=f"for {spec}") from error


def _parse_elements(text: str, name: str, shape: tuple[int, ...], spec: TensorSpec) -> Array:
    words = re.sub(r"[\[\],;]", " ", text).split()
    count = math.prod(shape)
    if len(words) not in (1, count):
        raise UsageError(f"{text[:80]!r} has {len(words)} values, expected {count}", hint=f"for {spec}")
    try:
        values = [_parse_element(word, name) for word in words]
    except ValueError as error:
        raise UsageError(f"invalid {name} value in {text[:80]!r}: {error}", hint=f"for {spec}") from error
    flat = np.array(values, dtype=object if name == "string" else np.complex128 if "complex" in name else None)
    if "int" in name:
        low, high = _get_limits(name)
        if any(not low <= value <= high for value in values):
            raise UsageError(f"{text[:80]!r} is out of range for {name}", hint=f"for {spec}")
        flat = np.array(values, dtype=np.uint64 if name == "uint64" else np.int64)
    filled = _make_zeros(shape, name)
    filled[...] = flat.astype(parse_dtype(name)).reshape(shape if flat.size == count else ())
    return filled


def _make_zeros(shape: tuple[int, ...], name: str) -> Array:
    try:
        return np.zeros(shape, parse_dtype(name))
    except (MemoryError, ValueError) as error:  # out of memory, or beyond numpy's limits
        raise UsageError(f"cannot allocate {type_text(name, shape)}") from error


def _parse_element(word: str, name: str) -> Any:
    if name == "string":
        return word
    if name == "bool":
        if word.lower() not in ("0", "1", "true", "false"):
            raise ValueError(word)
        return word.lower() in ("1", "true")
    if "int" in name:
        return int(word, 0)
    return complex(word) if "complex" in name else float(word)


def _read_npz(path: Path, specs: Sequence[TensorSpec], strict: bool) -> dict[str, Array]:
    by_name = {spec.name: spec for spec in specs}
    with Npz(path) as archive:
        names = dict(zip(archive.keys, archive.keys, strict=True))
        if all(re.fullmatch(r"arr_\d+", key) and key not in by_name for key in names):
            # arr_0, arr_1, ...: numpy's names for unnamed arrays, in order
            if len(names) > len(specs):
                raise UsageError(
                    f"{path} has {len(names)} arrays, expected at most {len(specs)}", hint=_format_signature(specs)
                )
            names = dict(zip(archive.keys, by_name, strict=False))
        if unknown := [name for name in names.values() if name not in by_name]:
            raise UsageError(f"unknown tensor {unknown[0]!r} in {path}", hint=_format_signature(specs, unknown[0]))
        return {
            name: restore_dtype(archive.read(key, make_spec_check(by_name[name], strict)), by_name[name].dtype)
            for key, name in names.items()
        }


# Maximum magnitude of random normal floats, so that sums and exponentials stay in range.
_CUT = 4.0
# Maximum magnitude of random integers wider than 8 bits, to avoid overflows, huge sizes and invalid indices.
_SMALL_INTEGER = 100
_WORDS = ("", "a", "hil", "board", "tensor", "naïve", "日本", "two words")


def make_random_tensor(
    spec: TensorSpec, shape: Sequence[int], *, seed: int, bounds: tuple[float, float] | None = None
) -> Array:
    """Return a random tensor without NaN or infinity, equal on every machine.

    Floats are normal (cut off at 4 standard deviations) or uniform within ``bounds``. Integers are uniform over all
    values up to 8 bits, else between -100 and 100, or within ``bounds``. Raises UsageError if the bounds contain no
    value of the dtype.
    """
    digest = hashlib.blake2b(f"{seed}\0{spec.name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    name, dtype, shape = spec.dtype, parse_dtype(spec.dtype), tuple(shape)
    if name == "string":
        words = generator.integers(0, len(_WORDS), shape)
        return np.asarray(np.array(_WORDS, dtype=object)[words], dtype=object).reshape(shape)
    if name == "bool":
        return np.asarray(generator.integers(0, 2, shape), np.bool_).reshape(shape)
    low, high = _get_limits(name)
    if "int" in name:
        if bounds is not None:
            low, high = _clip_bounds(spec, bounds, math.ceil(max(low, bounds[0])), math.floor(min(high, bounds[1])))
        elif _count_bits(name) > 8:
            low, high = max(low, -_SMALL_INTEGER), min(high, _SMALL_INTEGER)
        wide = np.uint64 if low >= 0 else np.int64
        return np.asarray(generator.integers(int(low), int(high), shape, wide, endpoint=True)).astype(dtype)
    if name in ("complex64", "complex128"):
        part = np.float32 if name == "complex64" else np.float64
        real, imaginary = (_draw_floats(generator, shape, part, bounds) for _ in range(2))
        return np.asarray(real + 1j * imaginary, dtype).reshape(shape)
    if bounds is not None:
        bounds = _clip_bounds(spec, bounds, max(low, bounds[0]), min(high, bounds[1]))
    values = _draw_floats(generator, shape, np.float64 if name == "float64" else np.float32, bounds)
    if low >= 0 and bounds is None:
        values = np.abs(values)  # unsigned dtype
    return np.clip(values, low, high).astype(dtype)


def _count_bits(name: str) -> int:
    """Return the number of bits of a dtype's elements."""
    return SUB_BYTE_BITS.get(name) or parse_dtype(name).itemsize * 8


def _draw_floats(generator: Any, shape: tuple[int, ...], dtype: Any, bounds: tuple[float, float] | None) -> Array:
    if bounds is None:
        return np.asarray(np.clip(generator.standard_normal(shape, dtype), -_CUT, _CUT), dtype)
    share = np.asarray(generator.random(shape, dtype), dtype)
    # Do not compute low + share * (high - low), which overflows for the dtype's full range.
    return np.asarray(share * dtype(bounds[1]) + (dtype(1) - share) * dtype(bounds[0]), dtype)


def _get_limits(name: str) -> tuple[float, float]:
    """Return the lowest and highest finite value of a numeric dtype."""
    if "int" in name:
        bits = _count_bits(name)
        return (0, (1 << bits) - 1) if name.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    limits = get_float_limits(parse_dtype(name))
    if name == "float8_e8m0fnu":
        # float8_e8m0fnu has powers of two from 2^-127 to 2^127. Intermediate results would flush the smallest to zero.
        return float(limits.smallest_normal), float(limits.max)
    return float(limits.min), float(limits.max)


def _clip_bounds(spec: TensorSpec, bounds: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    if not low <= high:
        raise UsageError(f"no {spec.dtype} value between {bounds[0]:g} and {bounds[1]:g}", hint=f"for input {spec}")
    return low, high


def make_calibration_samples(model: Model, given: Sequence[Mapping[str, Array]], count: int) -> list[dict[str, Array]]:
    """Return the calibration samples, each with all inputs by name.

    The samples are the given samples, the samples of the model's file, or random.

    Raises:
        UsageError: the samples do not match the model, or the file is invalid.
    """
    specs = model.inputs or ()
    file = make_sibling_path(model.path, CALIBRATION)
    from_file = not given and path_exists(file)
    if from_file:
        given = _read(file)
    # Use seeds other than 0, which is the default seed of random test inputs.
    seeds = range(1, 1 + (len(given) or count))
    samples = [dict(one) for one in given] or [{} for _ in seeds]
    try:
        return [
            make_inputs(specs, sample, seed=seed, ranges=model.ranges, dims=model.dims)
            for seed, sample in zip(seeds, samples, strict=True)
        ]
    except UsageError as error:
        where = f"{file}: " if from_file else "calibration data: " if given else ""
        raise UsageError(f"{where}{error.message}", hint=error.hint) from error


def digest_of_samples(samples: Sequence[Mapping[str, Array]]) -> str:
    """Return a digest for all samples: names, dtypes, shapes, values, order."""
    texts = [
        f"{name}\0{get_dtype_name(array.dtype)}\0{array.shape}\0{digest_of(to_bytes(array))}"
        for sample in samples
        for name, array in sample.items()
    ]
    return digest_of("\n".join([str(len(samples)), *texts]).encode())


def _read(file: Path) -> list[dict[str, Array]]:
    arrays = load_npz(file)
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if not counts or min(counts.values()) < 1 or len(set(counts.values())) > 1:
        held = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "none"
        raise UsageError(
            f"invalid arrays in {file}: {held}: expected an array per input, with the samples along the first axis",
            hint="numpy.savez(FILE, image=images), with one sample of the input image in images[0]",
        )
    return [{name: array[index] for name, array in arrays.items()} for index in range(next(iter(counts.values())))]
