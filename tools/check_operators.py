"""Compare hil with the vendors' tools on all ONNX node tests (`scripts/check-operators`).

Results are equal if both have outputs with the same dtypes, shapes and bits, or if both fail or crash at the same step.
"""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import click

from hil.controller.backends.compilers.iree_program import KEEP_FLOAT64
from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.models.importers.onnx_nodes import has_float64
from hil.controller.models.onnx_files.onnx_rewrites import OPSET
from hil.controller.records.suite import CaseRecord, make_case_record
from hil.controller.storage.isolation.isolated import Isolated, IsolatedCrash, IsolatedError
from hil.controller.storage.tensor_files import save_tensors
from hil.core.boards import load_board
from hil.core.npy import load_npy
from hil.core.scratch import make_temporary_folder
from hil.errors import EXIT_FAIL, EXIT_NOTHING_RAN, EXIT_OK, EXIT_USAGE, HilError, UsageError
from tools import by_hand
from tools.by_hand import Test, read_node_tests

TIMEOUT_SECONDS = 900.0
BOARD = "sim"
_SHOWN = 100

EQUAL = "the same bits"
REFUSED = "rejected at the same step"
CRASHED = "crashed at the same step"
# The results are equal with hil's flag for float64 models. By default, the compiler converts float64 to float32.
KEPT = f"the same, with {KEEP_FLOAT64}"
CONVERTED = f"the same, with iree-import-onnx --opset-version {OPSET}"
NO_TENSORS = "hil passes only tensors, no sequences or optionals"
RANDOM = "the vendors' tools give different results in repeated runs"
DIFFERENT = "DIFFERENT"
KINDS = (EQUAL, REFUSED, CRASHED, KEPT, CONVERTED, NO_TENSORS, RANDOM, DIFFERENT)


@dataclass(frozen=True)
class Finding:
    """Comparison of hil's result with the result of the vendors' tools."""

    id: str
    kind: str
    hil: str
    by_hand: str


Result = Mapping[str, Any]


def read_hil_results(run: Path) -> dict[str, tuple[CaseRecord, Result]]:
    """Return case -> hil's result, in the form of :mod:`tools.by_hand`."""
    found: dict[str, tuple[CaseRecord, Result]] = {}
    for line in (run / "results.jsonl").read_text().splitlines():
        record = make_case_record(json.loads(line))
        ended = record.ended in ("PASS", "FAIL", "BLIND")
        files = sorted((run / record.folder / "outputs").glob("*.npy"), key=lambda one: int(one.name.split("-")[0]))
        found[record.id] = (
            record,
            {
                "end": "ran" if ended else record.stage,
                "crashed": record.ended in ("COMPILE_CRASH", "RUN_CRASH"),
                "message": record.message,
                "outputs": list(map(_read_stored, files)) if ended else [],
            },
        )
    return found


def _read_stored(file: Path) -> list[Any]:
    """Return [dtype, shape, digest] of a stored tensor. The dtype is "" if numpy's format cannot represent it."""
    array = load_npy(file)
    if array.dtype.kind != "V":
        return by_hand.describe_arrays([array])[0]
    return ["", list(array.shape), by_hand.digest(array.view(f"u{array.dtype.itemsize}"))]


class Checker:
    """Runs node tests with the vendors' tools for a flow, and compares the results with hil's results.

    Args:
        flow: name of a flow without a recipe.
        isolated: process pool for the tools.
    """

    def __init__(self, flow: str, isolated: Isolated) -> None:
        known = load_flow(flow)
        if known.recipe:
            raise UsageError(f"unsupported flow {flow}: expected a flow without a recipe")
        board = load_board(BOARD).config
        self._runtime = known.runtime
        self._device = board.devices[known.runtime]
        self._flags = [*board.compile_flags.get(known.runtime, ()), *known.compile_flags]
        self._isolated = isolated

    @property
    def commands(self) -> str:
        """Commands of the vendors' tools, as text."""
        if self._runtime == "onnxruntime":
            return 'onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"]).run(None, INPUTS)'
        compiling = f"iree-compile MODEL.mlir -o MODEL.vmfb {' '.join(self._flags)}"
        running = f"iree-run-module --module=MODEL.vmfb --device={self._device} --input=... --output=..."
        return f"iree-import-onnx MODEL -o MODEL.mlir; {compiling}; {running}"

    def check(self, test: Test, record: CaseRecord, hil: Result) -> Finding:
        """Run a test with the vendors' tools, and compare hil's result."""
        with make_temporary_folder("hil-check-") as folder:
            (Path(folder) / by_hand.MODEL).write_bytes(test.model.SerializeToString())
            save_tensors(Path(folder) / by_hand.INPUTS, test.inputs)
            kind, results = DIFFERENT, []
            for name, result in self._iter_settings(test, Path(folder)):
                results.append(result)
                if found := find_equality(hil, result):
                    kind = found if name == EQUAL else name
                    break
            plain = results[0]
            if kind == DIFFERENT and record.ended == "IMPORT_ERROR" and "expected a tensor" in record.message:
                kind = NO_TENSORS
            if kind == DIFFERENT and plain["end"] == "ran" and self._is_varying(folder, test, plain):
                kind = RANDOM
        return Finding(test.id, kind, _format_result(hil), _format_result(plain))

    def _iter_settings(self, test: Test, folder: Path) -> Iterator[tuple[str, Result]]:
        """Yield (settings, result) of the plain tools, then with hil's settings if the plain importer supports less."""
        if self._runtime == "onnxruntime":
            yield EQUAL, self._call(by_hand.run_onnxruntime, folder=str(folder))
            return
        common = {"folder": str(folder), "device": self._device, "outputs": list(test.outputs)}
        yield EQUAL, self._call(by_hand.run_iree, **common, flags=self._flags, opset=0)
        flags = [*self._flags, *([KEEP_FLOAT64] if has_float64(test.model) else [])]
        if flags != self._flags:
            yield KEPT, self._call(by_hand.run_iree, **common, flags=flags, opset=0)
        if any(item.domain in ("", "ai.onnx") and item.version < OPSET for item in test.model.opset_import):
            yield CONVERTED, self._call(by_hand.run_iree, **common, flags=flags, opset=OPSET)

    def _is_varying(self, folder: str, test: Test, plain: Result) -> bool:
        """Return True if a repeated run gives a different result.

        In that case, the model draws random numbers, or the program reads memory outside of its tensors.
        """
        if self._runtime == "iree":
            return (
                int(self._call(by_hand.run_iree_repeatedly, folder=folder, device=self._device).get("answers", 1)) > 1
            )
        return not find_equality(next(self._iter_settings(test, Path(folder)))[1], plain)

    def _call(self, function: Callable[..., Any], **arguments: Any) -> Result:
        log = Path(arguments["folder"]) / "by_hand.log"
        try:
            return cast(Result, self._isolated.call(function, arguments, timeout=TIMEOUT_SECONDS, log=log))
        except IsolatedError as error:
            end = "run" if self._runtime == "onnxruntime" else "import"
            return {"end": end, "crashed": isinstance(error, IsolatedCrash), "message": error.message, "outputs": []}


def find_equality(hil: Result, other: Result) -> str:
    """Return in which way two results are equal; "" if they differ."""
    # hil's importer may reject models that the tools reject in the compiler or runtime.
    early = ("import", "compile")
    if hil["end"] != other["end"] and not (hil["end"] in early and other["end"] in early):
        return ""
    if hil["crashed"] != other["crashed"]:
        return ""
    if hil["end"] != "ran":
        return CRASHED if hil["crashed"] else REFUSED
    if len(hil["outputs"]) != len(other["outputs"]):
        return ""
    return EQUAL if all(map(_is_same_output, hil["outputs"], other["outputs"])) else ""


def _is_same_output(mine: Sequence[Any], other: Sequence[Any]) -> bool:
    """Compare two outputs. An unknown dtype or shape matches any other."""
    return mine[2] == other[2] and all(
        one == two or one == "" or two is None for one, two in zip(mine, other, strict=True)
    )


def _format_result(result: Result) -> str:
    if result["end"] == "ran":
        return "; ".join(f"{dtype} {shape} {text[:8]}" for dtype, shape, text in result["outputs"])
    return f"{'died' if result['crashed'] else 'refused'} at {result['end']}: {result['message'][:160]}"


@click.command(epilog="Example: scripts/check-operators --flow iree --filter 'conv*'")
@click.option("--flow", default="onnxruntime", show_default=True, help="Flow without a recipe.")
@click.option("--filter", "patterns", multiple=True, metavar="PATTERN", help="Filter as in hil suite run; repeatable.")
@click.option(
    "-j", "jobs", type=click.IntRange(min=1), metavar="N", help="Number of parallel jobs (default: one per core)."
)
@click.option(
    "--run",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Stored run of hil with --keep-all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(flow: str, patterns: tuple[str, ...], jobs: int | None, run: Path | None, as_json: bool) -> int:
    """Run the ONNX node tests with hil and with the vendors' tools, and compare all outcomes and output bits.

    The exit code is 1 if a result differs without a known reason, and 5 if no test matches.
    """
    with make_temporary_folder("hil-check-") as folder, Isolated(jobs) as isolated:
        checker = Checker(flow, isolated)
        results = read_hil_results(run or _run_hil(flow, patterns, jobs, Path(folder) / "run"))
        if not results:
            return EXIT_NOTHING_RAN
        tests = read_node_tests()
        with concurrent.futures.ThreadPoolExecutor(isolated.workers) as pool:
            futures = [pool.submit(checker.check, tests[name], *result) for name, result in results.items()]
            findings = [future.result() for future in _watch_futures(futures)]
    counts = {kind: sum(one.kind == kind for one in findings) for kind in KINDS}
    if as_json:
        told = {"schema": 1, "flow": flow, "by_hand": checker.commands, "counts": counts}
        print(json.dumps({**told, "cases": [asdict(one) for one in findings]}))
    else:
        _print(flow, checker.commands, counts, findings)
    return EXIT_FAIL if counts[DIFFERENT] else EXIT_OK


def _run_hil(flow: str, patterns: Sequence[str], jobs: int | None, out: Path) -> Path:
    command = [sys.executable, "-m", "hil.controller.cli.main", "suite", "run", "@operators", "--flow", flow]
    command += [part for pattern in patterns for part in ("--filter", pattern)]
    command += ["--keep-all", "--out", str(out), *(["-j", str(jobs)] if jobs else [])]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if not (out / "results.jsonl").exists() and done.returncode != EXIT_NOTHING_RAN:
        raise HilError(f"hil suite run failed with exit code {done.returncode}")
    return out


def _watch_futures(futures: Sequence[Any]) -> Iterator[Any]:
    """Yield the futures, and show a progress bar."""
    from rich.progress import track

    from hil.controller.storage.screen.console import Console

    console = Console(stderr=True)
    yield from track(futures, "vendors' tools", console=console, transient=True, disable=not console.is_terminal)


def _print(flow: str, commands: str, counts: Mapping[str, int], findings: Sequence[Finding]) -> None:
    from rich.table import Table

    from hil.controller.storage.screen.console import Console

    console = Console(soft_wrap=True)
    console.print(f"flow {flow}; vendors' tools: {commands}", markup=False)
    table = Table("result compared with the vendors' tools", "cases", box=None)
    for kind, count in counts.items():
        table.add_row(kind, str(count))
    table.add_row("all", str(sum(counts.values())))
    console.print(table)
    for one in [one for one in findings if one.kind == DIFFERENT][:_SHOWN]:
        console.print(f"{one.id}\n  hil:            {one.hil}\n  vendors' tools: {one.by_hand}", markup=False)


if __name__ == "__main__":
    try:
        code = main(standalone_mode=False, prog_name="scripts/check-operators")
    except HilError as error:
        click.echo(f"check-operators: {error}", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    sys.exit(code)
