"""Read datasets: samples with the inputs of a model, and a label."""

from __future__ import annotations

import csv
import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.inputs import make_inputs
from hil.controller.storage.paths import is_file, is_folder
from hil.controller.storage.tensor_files import load_npz, load_pb
from hil.core.bounded_json import parse_json, read_json
from hil.core.digest import digest_of
from hil.core.files import MAX_TEXT_BYTES, digest_file, read_text, resolve_within, suggest_path
from hil.core.npy import load_npy
from hil.core.tensors import Array, TensorSpec
from hil.errors import UsageError

# Loads a file of another format as an array: the function ``load`` of a metric's Python file.
LoadFile = Callable[[Path], Any]

LABELS = ("label", "labels")
_SAMPLE_NAMES = ("id", "name")
_POSITION = re.compile(r"input_(\d{1,9})")
_EXPECTED = re.compile(r"output_(\d{1,9})")
_LAYOUTS = (
    "use an .npz file, a .csv or .jsonl index, or a directory with a directory per sample, each with input_0.npy "
    "and label.npy, label.txt or label.json"
)


@dataclass(frozen=True)
class LabeledSample:
    """A sample's inputs by name, and the label: an array, or a JSON value."""

    name: str
    inputs: Mapping[str, Array]
    label: Any


class Dataset(ABC):
    """Samples by index.

    Attributes:
        path: the dataset's file or directory.
        names: the samples' names, in the dataset's order.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.names = list(names)
        if not self.names:
            raise UsageError(f"dataset {path} has no samples", hint=_LAYOUTS)
        if twice := next((name for name, count in Counter(self.names).items() if count > 1), ""):
            raise UsageError(f"dataset {path} has several samples with the name {twice!r}")

    @abstractmethod
    def read(self, index: int, specs: Sequence[TensorSpec]) -> LabeledSample:
        """Read a sample for a model with these inputs. Raises UsageError if the sample is incomplete or damaged."""

    def read_checked(self, index: int, specs: Sequence[TensorSpec], dims: Mapping[str, int]) -> LabeledSample:
        """Read a sample, and check dtype and shape of the inputs.

        Args:
            dims: sizes of symbolic dimensions.

        Raises:
            UsageError: see :meth:`read`; or an input does not fit. The message names the sample.
        """
        sample = self.read(index, specs)
        try:
            return replace(sample, inputs=make_inputs(specs, sample.inputs, dims=dims))
        except UsageError as error:
            raise UsageError(f"{self.path}, sample {sample.name}: {error.message}", hint=error.hint) from error

    @abstractmethod
    def digest_contents(self) -> str:
        """Return a digest of the labels and, if they are in the same file, of the inputs. Raises UsageError."""

    def digest_names(self) -> str:
        """Return a digest of the samples' names in order."""
        return digest_of("\0".join(self.names).encode())


def open_dataset(path: Path, load_file: LoadFile | None = None) -> Dataset:
    """Open a dataset. Tensors are read later, sample by sample, except those of an archive.

    Args:
        load_file: loads files other than .npy and .pb.

    Raises:
        UsageError: the dataset does not exist, has an unknown layout, or is damaged.
    """
    if is_folder(path):
        return FolderDataset(path, load_file)
    if not is_file(path):
        raise UsageError(f"no such dataset: {path}", hint=suggest_path(path) + _LAYOUTS)
    if path.suffix == ".npz":
        return ArchiveDataset(path)
    if path.suffix in (".csv", ".jsonl"):
        return IndexDataset(path, load_file)
    raise UsageError(f"unknown dataset format: {path}", hint=_LAYOUTS)


class ArchiveDataset(Dataset):
    """NumPy archive: an array per input and the array ``label``, with the samples in the first dimension."""

    def __init__(self, path: Path) -> None:
        arrays = load_npz(path)
        label = next((name for name in LABELS if name in arrays), None)
        if label is None:
            raise UsageError(f"{path} has no array 'label'", hint=f"arrays: {', '.join(arrays) or 'none'}")
        counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise UsageError(f"arrays in {path} have different numbers of samples: {shapes}")
        self._labels = arrays.pop(label)
        self._arrays = arrays
        super().__init__(path, [str(number) for number in range(counts[label])])

    def read(self, index: int, specs: Sequence[TensorSpec]) -> LabeledSample:
        """Return a sample. If an array has the rank of the input, the sample keeps the first dimension with size 1."""
        inputs = {}
        for spec, array in zip(specs, _choose_values(self._arrays, specs, str(self.path)), strict=True):
            inputs[spec.name] = array[index : index + 1] if array.ndim == len(spec.shape) else array[index]
        label = self._labels[index]
        return LabeledSample(self.names[index], inputs, label)

    def digest_contents(self) -> str:
        """Return a digest of the archive."""
        return _digest_files([self.path])


class IndexDataset(Dataset):
    """Index of samples: a .csv or .jsonl file with file names of inputs, and labels.

    There is a column per input, with the input's name. The column ``label`` contains a value, or the name of a .npy or
    .json file. The column ``id`` or ``name`` contains the name of the sample. Paths are relative to the directory of
    the index.
    """

    def __init__(self, path: Path, load_file: LoadFile | None = None) -> None:
        self._load_file = load_file
        self._rows = _read_csv(path) if path.suffix == ".csv" else _read_jsonl(path)
        names = []
        for number, row in enumerate(self._rows):
            if not any(label in row for label in LABELS):
                raise UsageError(f"{path}, sample {number}: missing 'label'", hint=f"columns: {', '.join(row)}")
            names.append(next((str(row[one]) for one in _SAMPLE_NAMES if one in row), str(number)))
        super().__init__(path, names)

    def read(self, index: int, specs: Sequence[TensorSpec]) -> LabeledSample:
        """Read the files of a sample."""
        row, where = self._rows[index], f"{self.path}, sample {self.names[index]}"
        columns = {name: value for name, value in row.items() if name not in (*LABELS, *_SAMPLE_NAMES)}
        inputs = {}
        for spec, value in zip(specs, _choose_values(columns, specs, where), strict=True):
            if not isinstance(value, str) or not value:
                raise UsageError(f"{where}: expected a file name for input {spec.name!r}, got {value!r:.80}")
            inputs[spec.name] = _load_tensor(self._locate(value, where), spec.dtype, self._load_file)
        label = next(row[one] for one in LABELS if one in row)
        file = self._label_file(index)
        return LabeledSample(self.names[index], inputs, label if file is None else _load_label(file))

    def digest_contents(self) -> str:
        """Return a digest of the index and of the labels' files."""
        return _digest_files([self.path, *filter(None, map(self._label_file, range(len(self._rows))))])

    def _label_file(self, index: int) -> Path | None:
        label = next(self._rows[index][one] for one in LABELS if one in self._rows[index])
        if not isinstance(label, str) or Path(label).suffix not in (".npy", ".json"):
            return None
        return self._locate(label, f"{self.path}, sample {self.names[index]}")

    def _locate(self, name: str, where: str) -> Path:
        """Return the path of a file in the index.

        Raises UsageError for a path outside, because an index is untrusted.
        """
        folder = self.path.parent
        try:
            return resolve_within(folder, folder / name)
        except UsageError as error:
            hint = "files must be below the directory of the index, also after resolving links"
            raise UsageError(f"{where}: {error.message}", hint=hint) from error


class FolderDataset(Dataset):
    """Directory with a directory per sample.

    A sample has a file ``input_N.npy`` or ``NAME.npy`` per input, and ``label.npy``, ``label.json`` or ``label.txt``.
    ONNX's test data (``input_N.pb``, ``output_N.pb``) is supported: the outputs are the label.
    """

    def __init__(self, path: Path, load_file: LoadFile | None = None) -> None:
        self._load_file = load_file
        try:
            entries = [one for one in path.iterdir() if not one.name.startswith(".")]
        except OSError as error:
            raise UsageError(f"cannot read dataset {path}: {error.strerror or error}") from error
        folders = [one for one in entries if is_folder(one)]
        if not folders and any(_POSITION.fullmatch(one.stem) for one in entries):
            raise UsageError(
                f"{path} is a sample, not a dataset", hint=f"use the parent directory: {path.absolute().parent}"
            )
        self._folders = sorted(folders, key=lambda one: _make_natural_key(one.name))
        super().__init__(path, [one.name for one in self._folders])

    def read(self, index: int, specs: Sequence[TensorSpec]) -> LabeledSample:
        """Read the files of a sample."""
        folder = self._folders[index]
        files = _list_files(folder)
        inputs: dict[str, Array] = {}
        for number, spec in enumerate(specs):
            file = files.get(spec.name) or files.get(f"input_{number}")
            if file is None:
                raise UsageError(f"sample {folder}: no file for input {spec.name!r}", hint=f"create input_{number}.npy")
            inputs[spec.name] = _load_tensor(file, spec.dtype, self._load_file)
        return LabeledSample(self.names[index], inputs, self._read_label(folder, files))

    def digest_contents(self) -> str:
        """Return a digest of the labels' files."""
        every = map(_list_files, self._folders)
        return _digest_files([files[name] for files in every for name in _label_names(files)])

    def _read_label(self, folder: Path, files: Mapping[str, Path]) -> Any:
        expected = _label_names(files)
        if not expected:
            raise UsageError(f"sample {folder} has no label", hint="create label.npy, label.json or label.txt")
        if expected[0] in LABELS:
            return _load_label(files[expected[0]])
        arrays = [_load_tensor(files[name], "", None) for name in expected]
        if len(arrays) == 1:
            return arrays[0]
        return dict(zip(expected, arrays, strict=True))


def _list_files(folder: Path) -> dict[str, Path]:
    """Return the files of a sample by name without suffix."""
    try:
        return {one.stem: one for one in sorted(folder.iterdir()) if is_file(one)}
    except OSError as error:
        raise UsageError(f"cannot read sample {folder}: {error.strerror or error}") from error


def _label_names(files: Mapping[str, Path]) -> list[str]:
    """Return the names of the label files: the label, or the expected outputs."""
    label = next((one for one in LABELS if one in files), None)
    return [label] if label else sorted(name for name in files if _EXPECTED.fullmatch(name))


def _digest_files(paths: Sequence[Path]) -> str:
    digests = []
    for path in paths:
        try:
            digests.append(digest_file(path))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return digest_of("\n".join(digests).encode())


def _choose_values(values: Mapping[str, Any], specs: Sequence[TensorSpec], where: str) -> list[Any]:
    """Return the value for every input by name. For a single input and a single value, names may differ."""
    if len(specs) == 1 and len(values) == 1:
        return list(values.values())
    for spec in specs:
        if spec.name not in values:
            raise UsageError(
                f"{where}: missing input {spec.name!r}", hint=f"the dataset has: {', '.join(values) or 'no inputs'}"
            )
    return [values[spec.name] for spec in specs]


def _load_tensor(path: Path, dtype: str, load_file: LoadFile | None) -> Array:
    if load_file is not None and path.suffix not in (".npy", ".pb"):
        if not is_file(path):
            raise UsageError(f"no such file: {path}")
        try:
            return np.asarray(load_file(path))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything, even SystemExit
            raise UsageError(f"load failed for {path}: {type(error).__name__}: {error}"[:500]) from error
    if path.suffix == ".npy":
        return load_npy(path, dtype)
    if path.suffix == ".pb":
        return load_pb(path)
    raise UsageError(
        f"cannot read {path}: expected a .npy or .pb file",
        hint="convert the file, or define load(path) in the Python file of --metric",
    )


def _load_label(path: Path) -> Any:
    if path.suffix == ".npy":
        return load_npy(path)
    if path.suffix == ".pb":
        return load_pb(path)
    try:
        if path.suffix == ".json":
            return read_json(path, MAX_TEXT_BYTES)
        if path.suffix == ".txt":
            return read_text(path).strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read label {path}: {getattr(error, 'strerror', None) or error}") from error
    raise UsageError(f"cannot read label {path}: expected .npy, .json, .txt or .pb")


def _read_csv(path: Path) -> list[dict[str, Any]]:
    try:
        rows = list(csv.DictReader(io.StringIO(_read_index(path)), strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UsageError(f"{path}, row {number}: number of values differs from the header")
    return [{name: value for name, value in row.items() if name} for row in rows]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_read_index(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.encode())
        except ValueError as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: expected a JSON object")
        rows.append(row)
    return rows


def _read_index(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _make_natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders ``set_2`` before ``set_10``."""
    parts = re.split(r"(\d{1,18})", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
