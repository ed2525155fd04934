"""What a program of the runtime xla-aot says of itself: text in the library, which a board reads."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hil.core.tensors import Array, TensorSpec, from_bytes, nbytes_of

# Raise it when the library's functions, or what they say, change.
ABI = 1
LIBRARY = "program.so"
# The first values of the variables, one after the other, beside the library; under a name of its own where several
# libraries may lie in a folder. Where there is no such file, the variables are inputs.
VALUES = "variables.bin"


def values_name(library: str) -> str:
    """The name of the file of first values that is one library's alone."""
    return f"{Path(library).stem}.{VALUES}"


def values_beside(library: Path) -> Path | None:
    """The file of first values that lies beside a library: its own, else the one of any library there."""
    for name in (values_name(library.name), VALUES):
        if os.path.isfile(values := library.with_name(name)):  # noqa: PTH113 (a name may be too long for a path)
            return values
    return None


@dataclass(frozen=True)
class Argument:
    """An argument of the compiled function, in order."""

    spec: TensorSpec
    variable: bool = False  # whether it is a variable; those follow all inputs
    assigned: bool = False  # of a variable: whether running assigns it, in place


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a library: the results are the outputs, then new values of assigned variables."""

    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def variables(self) -> tuple[Argument, ...]:
        """The arguments that are variables."""
        return tuple(argument for argument in self.arguments if argument.variable)

    def inputs(self, *, variables: bool) -> tuple[TensorSpec, ...]:
        """What a caller gives, with the variables or without."""
        return tuple(argument.spec for argument in self.arguments if variables or not argument.variable)

    def values(self, data: bytes) -> dict[str, Array]:
        """The variables' values in the file beside the library.

        Raises:
            ValueError: it has another size than they take.
        """
        specs = [variable.spec for variable in self.variables]
        total = sum(map(size_of, specs))
        if len(data) != total:
            raise ValueError(f"{VALUES} has {len(data)} bytes, the program's variables take {total}")
        file = io.BytesIO(data)
        return {spec.name: from_bytes(file.read(size_of(spec)), spec.dtype, shape_of(spec)) for spec in specs}

    def results(self) -> tuple[TensorSpec, ...]:
        """What a caller gets: the outputs, then the new values of the variables."""
        assigned = (argument.spec for argument in self.arguments if argument.assigned)
        return (*self.outputs, *(replace(spec, name=f"variable {spec.name}") for spec in assigned))


def shape_of(spec: TensorSpec) -> tuple[int, ...]:
    """A tensor's shape, which in a compiled program is numbers only."""
    return tuple(dim for dim in spec.shape if isinstance(dim, int))


def size_of(spec: TensorSpec) -> int:
    """A tensor's size in bytes."""
    return nbytes_of(spec.dtype, shape_of(spec))


def write_signature(signature: Signature) -> str:
    """A signature as text, in ASCII."""
    return json.dumps({"abi": ABI, **asdict(signature)})


# How the text begins in a library's file, which nobody needs to load to read it: it may be of another machine.
_BEGINNING = write_signature(Signature("", (), ())).partition(str(ABI))[0].encode()


def find_signature(library: bytes) -> Signature:
    """The signature in a library's file. Raises ValueError: it has none, or one of another version."""
    begin = library.find(_BEGINNING)
    if begin < 0:
        raise ValueError("it has no signature of a program")
    return read_signature(library[begin : library.find(b"\0", begin)].decode(errors="replace"))


def read_signature(text: str) -> Signature:
    """A signature from its text. Raises ValueError: it is none, or of another version."""
    try:
        found = json.loads(text)
        if found["abi"] != ABI:
            raise ValueError(f"the program's interface has version {found['abi']}, expected was {ABI}")
        arguments = [Argument(_spec(one["spec"]), one["variable"], one["assigned"]) for one in found["arguments"]]
        return Signature(found["function"], tuple(arguments), tuple(map(_spec, found["outputs"])))
    except (KeyError, TypeError, AssertionError, RecursionError) as error:
        raise ValueError(f"the program's signature cannot be read: {error!r}") from error


def _spec(found: dict[str, object]) -> TensorSpec:
    shape = found["shape"]
    assert isinstance(shape, list)
    return TensorSpec(str(found["name"]), str(found["dtype"]), tuple(shape))
