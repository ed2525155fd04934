"""Compare hil with iree-run-module on programs that hil did not compile (`scripts/check-foreign`).

iree-import-onnx and iree-compile compile an ONNX node test. Both tools run the program from flag files of three forms:

- ``npy``: tensors in .npy files, if numpy has their dtypes.
- ``typed``: ``2x3xf32=@x.bin`` and ``2x3xf32=1 2 ...``.
- ``wrong``: like ``typed``, but the last element of the first expected output is changed.

Results are equal if hil reports PASS when the tool prints [SUCCESS], FAIL for [FAILED], and an error otherwise. If the
tool crashes, the results are not compared. For example, the tool crashes when it prints an 8-bit NaN that differs.

There is a known difference. The tool reports equal integers as different if the expected integers are signed and the
program's integers are signless. hil does the same, except for an output that is equal to an input: the output may be
the input itself, which the tool accepts.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import numpy as np

from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.isolation.isolated import Isolated, IsolatedCrash
from hil.controller.storage.run_context import Progress
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.run_job import run_job
from hil.core.boards import load_board
from hil.core.npy import save_npy
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import NUMPY_DTYPES, Array, get_dtype_name, make_spec
from hil.errors import EXIT_FAIL, EXIT_NOTHING_RAN, EXIT_OK, EXIT_USAGE, HilError
from hil.formats.iree_command import format_tool_type, give
from tools.by_hand import MODEL, STEP_TIMEOUT_SECONDS, find_tool, run_command
from tools.check_operators import BOARD

_HERE = "tools.check_foreign"  # module name of the functions below, because this module also runs as __main__
FORMS = ("npy", "typed", "wrong")
SUCCESS, FAILED, REFUSED, DIED = "SUCCESS", "FAILED", "refused", "died"
_WORDS = {"PASS": SUCCESS, "FAIL": FAILED}
# Maximum number of elements that the form ``typed`` writes as text.
_AS_TEXT = 12
_SHOWN = 100


@dataclass(frozen=True)
class Finding:
    """Results of both tools for a flag file."""

    id: str  # test name and form
    tool: str  # result of the tool: SUCCESS, FAILED, refused or died
    hil: str  # hil's result in the same words, or a different hil outcome
    reason: str  # hil's reason
    like_input: bool = False  # True if an expected integer output is equal to an input

    @property
    def equal(self) -> bool:
        """True if the results are equal, or the tool crashed."""
        return self.tool in (self.hil, DIED)

    @property
    def known(self) -> bool:
        """True if this is the known difference."""
        return self.like_input and self.id.endswith(" npy") and (self.tool, self.hil) == (FAILED, SUCCESS)


def run_iree_tools(folder: str, flags: Sequence[str], device: str) -> dict[str, str]:
    """Compile a model with IREE's tools, write the flag files, and run iree-run-module. Runs in a separate process.

    Args:
        folder: contains ``model.onnx`` and the tensors in ``inputs`` and ``outputs``.
        flags: for iree-compile.
        device: for iree-run-module.

    Returns:
        Form -> result of the tool; empty if the model cannot be compiled.
    """
    from iree.compiler.tools.import_onnx.__main__ import main, parse_arguments

    place = Path(folder)
    try:
        # Call the command's main function directly to save Python's startup time.
        with contextlib.redirect_stdout(io.StringIO()):
            main(parse_arguments([str(place / MODEL), "-o", str(place / "model.mlir")]))
    except (Exception, SystemExit):
        return {}
    if run_command([find_tool("iree-compile"), place / "model.mlir", "-o", place / "model.vmfb", *flags])["code"]:
        return {}
    inputs, outputs = (list(load_tensors(place / side).values()) for side in ("inputs", "outputs"))
    found = {}
    for form in FORMS:
        expected = _corrupt_outputs(outputs) if form == "wrong" else outputs
        lines = ["--module=model.vmfb", f"--device={device}"]
        lines += [f"--input={_write_tensor(array, place, f'{form}-in{n}', form)}" for n, array in enumerate(inputs)]
        lines += [
            f"--expected_output={_write_tensor(one, place, f'{form}-out{n}', form)}" for n, one in enumerate(expected)
        ]
        (place / f"{form}.flagfile").write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            [find_tool("iree-run-module"), f"--flagfile={form}.flagfile"],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STEP_TIMEOUT_SECONDS,
            check=False,
        )
        said = done.stdout.decode(errors="replace")
        word = SUCCESS if "[SUCCESS]" in said else FAILED if "[FAILED]" in said else REFUSED
        found[form] = word if done.returncode in (0, 1) else DIED
    return found


def _write_tensor(array: Array, folder: Path, stem: str, form: str) -> str:
    """Return a tensor as the value of a flag, and write its file if necessary."""
    array, name = np.array(array, order="C"), get_dtype_name(array.dtype)  # the tool requires C order
    # The tool does not support bool and complex values as text or raw elements.
    if array.dtype.kind in "bc" or (form == "npy" and name in NUMPY_DTYPES):
        save_npy(folder / f"{stem}.npy", array)
        return f"@{stem}.npy"
    if 0 < array.size <= _AS_TEXT and name in NUMPY_DTYPES:
        plain = array.view(f"i{array.dtype.itemsize}") if array.dtype.kind == "u" else array
        return f"{format_tool_type(name, array.shape)}={' '.join(map(str, plain.ravel().tolist()))}"
    return give(make_spec("", array), array, stem, folder, ".", tensors="bin").value


def _corrupt_outputs(outputs: Sequence[Array]) -> list[Array]:
    first, *others = outputs
    if not first.size:
        return list(outputs)
    changed = first.copy()
    raw = changed.reshape(-1)[-1:].view(np.uint8)
    raw[-1] ^= 1 if changed.dtype.kind == "b" else 0x41  # in a float, this changes the exponent
    return [changed, *others]


class _Quiet:
    """Progress without output."""

    def begin(self, name: str, stages: int) -> None:
        """Do nothing."""

    def stage(self, name: str, number: int, text: str) -> None:
        """Do nothing."""

    def end(self, name: str, outcome: str = "", reason: str = "") -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def interrupt(self, command: str) -> None:
        """Do nothing."""


def _is_like_input(inputs: Iterable[Array], outputs: Iterable[Array]) -> bool:
    return any(
        one.dtype.kind in "iu" and one.dtype == other.dtype and np.array_equal(one, other)
        for one, other in itertools.product(outputs, inputs)
    )


@contextlib.contextmanager
def start_simulator(folder: Path) -> Iterator[str]:
    """Start a simulated board, and yield its address."""
    command = [sys.executable, "-m", "hil.sim", "--listen", f"unix:{folder}/sim.sock", "--store", f"{folder}/store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def run_hil(file: Path, board: str, out: Path, isolated: Isolated) -> tuple[str, str]:
    """Return hil's result for a flag file, in the words of the tool, and the reason."""
    screen: Progress = _Quiet()
    try:
        record = run_job(Job(flagfile=file, board=board, out=out), screen=screen, isolated=isolated)
    except HilError as error:
        return REFUSED, str(error)
    (case,) = record.cases
    outcome = case.outcome.value if case.outcome else ""
    return _WORDS.get(outcome, REFUSED if outcome.endswith(("ERROR", "CRASH")) else outcome), case.reason


def check(tests: Mapping[str, Any], isolated: Isolated, folder: Path) -> Iterator[Finding]:
    """Yield the findings of tests as they complete.

    Args:
        tests: name -> (model, inputs, outputs): an ONNX model and arrays by name.
        isolated: process pool for compilation and import.
        folder: directory for all files.
    """
    board = load_board(BOARD).config
    flags, device = board.compile_flags["iree"], board.devices["iree"]

    def ask(name: str, model: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, str]:
        place = folder / name
        place.mkdir()
        (place / MODEL).write_bytes(model.SerializeToString())
        save_tensors(place / "inputs", inputs)
        save_tensors(place / "outputs", outputs)
        arguments = {"folder": str(place), "flags": flags, "device": device}
        try:
            said: dict[str, str] = isolated.call(
                f"{_HERE}:run_iree_tools", arguments, timeout=4 * STEP_TIMEOUT_SECONDS, log=place / "tools.log"
            )
        except IsolatedCrash:
            return {}  # the importer crashed
        return said

    with start_simulator(folder) as address, concurrent.futures.ThreadPoolExecutor(isolated.workers) as pool:
        asked = {pool.submit(ask, name, *parts): name for name, parts in tests.items()}
        for done in concurrent.futures.as_completed(asked):
            name = asked[done]
            for form, said in done.result().items():
                file, (_, inputs, outputs) = folder / name / f"{form}.flagfile", tests[name]
                ours = run_hil(file, address, folder / "runs", isolated)
                yield Finding(f"{name} {form}", said, *ours, _is_like_input(inputs.values(), outputs.values()))


def read_node_tests(patterns: Sequence[str], every: int) -> dict[str, tuple[Any, dict[str, Array], dict[str, Array]]]:
    """Return ONNX's node tests with only tensors as inputs and outputs: name -> (model, inputs, outputs).

    Args:
        patterns: patterns of the tests' names; empty for all tests.
        every: return only every Nth matching test.
    """
    from onnx import TensorProto, numpy_helper
    from onnx.backend.test.loader import load_model_tests

    def convert_arrays(infos: Any, values: Any) -> dict[str, Array] | None:
        plain = [numpy_helper.to_array(one) if isinstance(one, TensorProto) else one for one in values]
        if len(infos) != len(plain) or not all(isinstance(one, (np.ndarray, np.generic)) for one in plain):
            return None
        found = {info.name: np.asarray(one) for info, one in zip(infos, plain, strict=True)}
        return None if any(one.dtype.kind in "OSU" for one in found.values()) else found

    found = {}
    with np.errstate(all="ignore"):
        loaded: list[Any] = load_model_tests(kind="node")
    for test in loaded:
        name = test.name.removeprefix("test_")
        if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        for inputs, outputs in test.data_sets[:1]:
            takes, gives = (
                convert_arrays(test.model.graph.input, inputs),
                convert_arrays(test.model.graph.output, outputs),
            )
            if takes is not None and gives:
                found[name] = (test.model, takes, gives)
    return {name: found[name] for name in sorted(found)[::every]}


@click.command(epilog="Example: scripts/check-foreign --filter 'conv*'")
@click.option(
    "--filter", "patterns", multiple=True, metavar="PATTERN", help="Run only tests that match PATTERN; repeatable."
)
@click.option("--every", type=click.IntRange(min=1), default=5, show_default=True, help="Run only every Nth test.")
@click.option(
    "-j", "jobs", type=click.IntRange(min=1), metavar="N", help="Number of parallel jobs (default: one per core)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(patterns: tuple[str, ...], every: int, jobs: int | None, as_json: bool) -> int:
    """Compile ONNX's node tests with IREE's tools, run them with hil and iree-run-module, and compare the verdicts.

    The exit code is 1 if a verdict differs, and 5 if no test matches or none can be compiled.
    """
    from rich.progress import track

    from hil.controller.storage.screen.console import Console

    tests = read_node_tests(patterns, every)
    errors = Console(stderr=True)
    with make_temporary_folder("hil-check-") as folder, Isolated(jobs) as isolated:
        found = check(tests, isolated, Path(folder))
        shown = track(found, "flag files", total=None, console=errors, transient=True, disable=not errors.is_terminal)
        findings = sorted(shown, key=lambda one: one.id)
    programs = {one.id.split()[0] for one in findings}
    words = (SUCCESS, FAILED, REFUSED, DIED)
    counts = {word: sum(one.tool == word and one.equal for one in findings) for word in words}
    known = sum(one.known for one in findings)
    different = [one for one in findings if not one.equal and not one.known]
    if as_json:
        told = {"schema": 1, "tests": len(tests), "programs": len(programs), "counts": counts, "known": known}
        print(json.dumps({**told, "different": [asdict(one) for one in different]}))
    else:
        print(f"{len(tests)} tests, {len(programs)} compiled, {len(findings)} flag files")
        died = counts.pop(DIED)
        print(
            *(f"{word} in both: {count};" for word, count in counts.items()), f"iree-run-module died: {died};", end=" "
        )
        print(f"different: {len(different)}, known differences (see docs/running.md): {known}")
        for one in different[:_SHOWN]:
            print(f"{one.id}\n  iree-run-module: {one.tool}\n  hil:             {one.hil}: {one.reason[:200]}")
    return EXIT_FAIL if different else EXIT_OK if findings else EXIT_NOTHING_RAN


if __name__ == "__main__":
    try:
        code = main(standalone_mode=False, prog_name="scripts/check-foreign")
    except HilError as error:
        click.echo(f"check-foreign: {error}", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    sys.exit(code)
