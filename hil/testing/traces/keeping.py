"""Traces among the artifacts, each call with the flag file that runs it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hil.controller.pipeline.flagfiles import ATOLS, FlagFile, write_flagfile
from hil.controller.storage.runs import storing
from hil.core.digest import digest_of
from hil.core.tensors import NUMPY_DTYPES, Array, spec_of, to_bytes
from hil.formats.iree_command import give
from hil.testing.traces.runners import Program, same_bits
from hil.testing.traces.structure import arrays_in
from hil.testing.traces.trace import ModuleCall, Trace, call_name
from hil.testing.traces.traced import Traced

FLAGFILE = "flagfile"
TENSORS = "tensors"
_DIGITS = 24
# What IREE runs on where nobody says: the agent's own choice.
DEFAULT_DEVICE = "local-task"


def save_traced(traced: Traced, folder: Path, *, wanted: Trace | None = None) -> None:
    """Keep a trace, with a flag file for each call that a program of IREE's made.

    ``flagfile`` is the first call's, ``flagfile_call_N`` that of call N. They expect what the reference returned and
    what it made of the variables, and nothing where it made no such call.

    Args:
        traced: the trace and its programs.
        folder: where it goes.
        wanted: the reference's trace; None for the reference itself.

    Raises:
        StorageError: it cannot be written.
    """
    traced.trace.save(folder)
    for number, (call, program) in enumerate(zip(traced.trace.calls, traced.programs, strict=True)):
        if program is None:
            continue
        calls = traced.trace.calls if wanted is None else wanted.calls
        reference = calls[number] if number < len(calls) else None
        flags = _flags(program, _expected(program, call, reference), call, folder / TENSORS)
        write_flagfile(folder / f"{FLAGFILE}_{call_name(number)}", flags)
        if number == 0:
            write_flagfile(folder / FLAGFILE, flags)


def _expected(program: Program, call: ModuleCall, reference: ModuleCall | None) -> Sequence[Array]:
    """A program's outputs as the reference has them: a call's own, then new values of variables."""
    if reference is None or reference.method != call.method:
        return ()
    wanted = arrays_in(reference.outputs)
    if wanted.keys() != arrays_in(call.outputs).keys() or not reference.state.keys() >= set(program.assigned):
        return ()
    expected = [*wanted.values(), *(reference.state[name] for name in program.assigned)]
    return [same_bits(dtype, array) for dtype, array in zip(program.answer.dtypes, expected, strict=True)]


def _flags(program: Program, expected: Sequence[Array], call: ModuleCall, folder: Path) -> FlagFile:
    """A call's flags; its tensors lie in a folder that all calls share: most variables stay what they are."""
    with storing(folder):
        folder.mkdir(exist_ok=True)
        return FlagFile(
            modules=(program.path,),
            function=program.function,
            device=program.device or DEFAULT_DEVICE,
            inputs=tuple(_tensor(array, folder) for array in program.answer.given),
            expected=tuple(_tensor(array, folder) for array in expected),
            parameters=tuple(path for path in program.rest if path.suffix == ".irpa"),
            rtol=call.rtol,
            atols={} if call.atol is None else dict.fromkeys(ATOLS, call.atol),
        )


def _tensor(array: Array, folder: Path) -> str:
    """Write a tensor as IREE's tools take it, and tell how they do."""
    spec = spec_of("", array)
    name = digest_of(f"{spec}\0".encode() + bytes(to_bytes(array))).rpartition(":")[2][:_DIGITS]
    # The tools take integers in .npy for signed ones, which IREE's programs do not have: they would never be equal.
    kind = "npy" if array.dtype.kind in "fc" and spec.dtype in NUMPY_DTYPES else "bin"
    return give(spec, array, name, folder, str(folder.absolute()), tensors=kind).value
