"""Read and write the signature of an xla-aot program.

The program's library contains the signature as text. The board reads this text.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hil.core.tensors import Array, TensorSpec, count_bytes, from_bytes

# Version of the library's interface. Increase this number if the library's functions or their results change.
ABI = 1
LIBRARY = "program.so"
# File with the initial values of all variables, concatenated, in the library's directory. The name includes the library
# if the directory may contain multiple libraries. Without this file, the variables are inputs.
VALUES = "variables.bin"


def make_values_name(library: str) -> str:
    """Return the file name for a specific library's initial values."""
    return f"{Path(library).stem}.{VALUES}"


def find_values(library: Path) -> Path | None:
    """Return the file with the initial values for a library.

    This is the file with the library's name, or the shared file in the library's directory.
    """
    for name in (make_values_name(library.name), VALUES):
        if os.path.isfile(values := library.with_name(name)):  # noqa: PTH113 (a name may be too long for a path)
            return values
    return None


@dataclass(frozen=True)
class Argument:
    """Argument of the compiled function, in order."""

    spec: TensorSpec
    variable: bool = False  # True for a variable; variables follow all inputs
    assigned: bool = False  # True for a variable that a run assigns in place


@dataclass(frozen=True)
class LibrarySignature:
    """Arguments and results of a library. Results are the outputs, then new values of assigned variables."""

    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def variables(self) -> tuple[Argument, ...]:
        """Arguments that are variables."""
        return tuple(argument for argument in self.arguments if argument.variable)

    def inputs(self, *, variables: bool) -> tuple[TensorSpec, ...]:
        """Return the inputs that a caller provides, with or without variables."""
        return tuple(argument.spec for argument in self.arguments if variables or not argument.variable)

    def values(self, data: bytes) -> dict[str, Array]:
        """Parse the content of the file with the initial values: variable name -> value.

        Raises:
            ValueError: the size does not match the variables.
        """
        specs = [variable.spec for variable in self.variables]
        total = sum(map(compute_size, specs))
        if len(data) != total:
            raise ValueError(f"{VALUES} has {len(data)} bytes, but the program's variables need {total}")
        file = io.BytesIO(data)
        return {spec.name: from_bytes(file.read(compute_size(spec)), spec.dtype, shape_of(spec)) for spec in specs}

    def list_results(self) -> tuple[TensorSpec, ...]:
        """Return the results for a caller: outputs, then new values of variables."""
        assigned = (argument.spec for argument in self.arguments if argument.assigned)
        return (*self.outputs, *(replace(spec, name=f"variable {spec.name}") for spec in assigned))


def shape_of(spec: TensorSpec) -> tuple[int, ...]:
    """Return a tensor's shape. Compiled programs have only static dimensions."""
    return tuple(dim for dim in spec.shape if isinstance(dim, int))


def compute_size(spec: TensorSpec) -> int:
    """Return a tensor's size in bytes."""
    return count_bytes(spec.dtype, shape_of(spec))


def write_signature(signature: LibrarySignature) -> str:
    """Format a signature as ASCII text."""
    return json.dumps({"abi": ABI, **asdict(signature)})


# Prefix of the signature text in a library's file. hil searches the file for this prefix and does not load the library,
# which may be for another architecture.
_BEGINNING = write_signature(LibrarySignature("", (), ())).partition(str(ABI))[0].encode()


def find_signature(library: bytes) -> LibrarySignature:
    """Return the signature in a library's file.

    Raises ValueError if the signature is missing or has another version.
    """
    begin = library.find(_BEGINNING)
    if begin < 0:
        raise ValueError("missing program signature")
    return read_signature(library[begin : library.find(b"\0", begin)].decode(errors="replace"))


def read_signature(text: str) -> LibrarySignature:
    """Parse a signature. Raises ValueError if the signature is invalid or has another version."""
    try:
        found = json.loads(text)
        if found["abi"] != ABI:
            raise ValueError(f"unsupported program interface version {found['abi']}, expected {ABI}")
        arguments = [Argument(_parse_spec(one["spec"]), one["variable"], one["assigned"]) for one in found["arguments"]]
        return LibrarySignature(found["function"], tuple(arguments), tuple(map(_parse_spec, found["outputs"])))
    except (KeyError, TypeError, AssertionError, RecursionError) as error:
        raise ValueError(f"invalid program signature: {error!r}") from error


def _parse_spec(found: dict[str, object]) -> TensorSpec:
    shape = found["shape"]
    assert isinstance(shape, list)
    return TensorSpec(str(found["name"]), str(found["dtype"]), tuple(shape))
