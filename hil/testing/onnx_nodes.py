"""The ONNX backend node tests of the installed `onnx` package, each one through the pipeline on a board.

Every test brings its model, inputs, expected outputs and tolerance. `scripts/onnx-nodes` is this module's command.
"""

from __future__ import annotations

import concurrent.futures
import csv
import fnmatch
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from hil.controller.cache import Cache
from hil.controller.choice import BoardChoice, choose
from hil.controller.isolated import Isolated
from hil.controller.opening import AnyBoard, open_board
from hil.controller.pipeline import Case, Options, Workshop, begin, conclude, execute, prepare, refer_case
from hil.errors import EXIT_INTERRUPTED, EXIT_NOTHING_RAN, EXIT_OK, EXIT_STAGE, BoardError, HilError, UsageError
from hil.results import Outcome

RUNTIMES = ("onnxruntime", "iree")
TIMEOUT_S = 60.0
_SHOWN = 50


@dataclass(frozen=True)
class NodeTest:
    """One test as onnx has it in memory: a ModelProto, and the values of its first data set in the model's order."""

    name: str
    model: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    rtol: float
    atol: float


@dataclass(frozen=True)
class NodeResult:
    """How a test ended. ``explained`` is False for what is our own fault, not the model's, runtime's or compiler's."""

    name: str
    runtime: str
    outcome: str
    stage: str
    reason: str
    explained: bool


def node_tests(patterns: Sequence[str] = ("*",)) -> list[NodeTest]:
    """The tests whose names match one of the shell patterns, by name."""
    from onnx.backend.test.loader import load_model_tests

    found = []
    with warnings.catch_warnings():
        # Making its expected values, onnx divides by zero on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        tests = load_model_tests(kind="node")
    for test in tests:
        name = test.name.removeprefix("test_")
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns) and test.model is not None and test.data_sets:
            inputs, outputs = test.data_sets[0]
            found.append(NodeTest(name, test.model, tuple(inputs), tuple(outputs), test.rtol, test.atol))
    return sorted(found, key=lambda test: test.name)


def _write(folder: Path, kind: str, values: Sequence[Any]) -> list[str]:
    """Write values as ONNX's .pb files; what is no tensor (a sequence, an absent optional) has none."""
    import numpy as np
    from onnx import TensorProto, numpy_helper

    files = []
    for number, value in enumerate(values):
        if isinstance(value, (np.ndarray, np.generic)):
            value = numpy_helper.from_array(np.asarray(value))
        if isinstance(value, TensorProto):
            path = folder / f"{kind}_{number}.pb"
            path.write_bytes(value.SerializeToString())
            files.append(str(path))
    return files


def run_tests(
    tests: Sequence[NodeTest], runtime: str, choice: BoardChoice, workers: int | None
) -> Iterator[NodeResult]:
    """Run tests on a board; yields each result as it comes, in order.

    Args:
        tests: from :func:`node_tests`.
        runtime: the runtime on the board.
        choice: the board.
        workers: how many compile at a time; None is one a core.

    Raises:
        BoardError: the board cannot be had at all.
    """
    with tempfile.TemporaryDirectory(prefix="hil-nodes-") as folder, Isolated(workers) as isolated:
        shop = Workshop(Cache(), isolated)
        with concurrent.futures.ThreadPoolExecutor(isolated.workers) as pool:
            pending = [pool.submit(_prepared, test, runtime, choice, shop, Path(folder)) for test in tests]
            board: AnyBoard | None = None
            try:
                for test, future in zip(tests, pending, strict=True):
                    case = future.result()
                    if isinstance(case, Case) and not case.outcome:
                        board = board or open_board(choice, runtime=runtime, purpose="onnx node tests")
                        case = _finished(case, board, shop)
                        if isinstance(case, Case) and isinstance(case.error, BoardError):
                            board.close()
                            board = None
                    yield _result(test, runtime, case)
            except BaseException:
                for future in pending:
                    future.cancel()
                isolated.close()
                raise
            finally:
                if board is not None:
                    board.close()


def _prepared(test: NodeTest, runtime: str, choice: BoardChoice, shop: Workshop, folder: Path) -> Case | Exception:
    import onnx

    place = folder / test.name
    try:
        (place / "logs").mkdir(parents=True)
        onnx.save(test.model, place / "model.onnx")
        options = Options(
            runtime=runtime,
            inputs=_write(place, "input", test.inputs),
            expected=_write(place, "output", test.outputs),
            rtol=test.rtol,
            atol=test.atol,
            timeout=TIMEOUT_S,
        )
        return prepare(begin(place / "model.onnx", options, place, shop), choice.config, shop)
    except Exception as error:
        return error


def _finished(case: Case, board: AnyBoard, shop: Workshop) -> Case | Exception:
    try:
        return conclude(refer_case(execute(case, board, shop), shop), shop)
    except Exception as error:
        return error


def _result(test: NodeTest, runtime: str, ended: Case | Exception) -> NodeResult:
    if isinstance(ended, Case):
        outcome = ended.outcome.value if ended.outcome else "UNFINISHED"
        return NodeResult(test.name, runtime, outcome, ended.stage, ended.reason, is_explained(ended))
    kind = "USAGE" if isinstance(ended, UsageError) else "INTERNAL"
    stage = ended.stage if isinstance(ended, HilError) else ""
    return NodeResult(test.name, runtime, kind, stage, f"{type(ended).__name__}: {ended}", False)


def is_explained(case: Case) -> bool:
    """Whether a case ended as one may: with a verdict, or with an error of the model's, told without a traceback."""
    if case.outcome in (Outcome.PASS, Outcome.FAIL):
        return True
    error = case.error
    if error is None or isinstance(error, BoardError):
        return False
    return bool(error.message.strip()) and "Traceback (most recent call last)" not in error.detail


@click.command(epilog="Example: scripts/onnx-nodes --runtime onnxruntime --filter 'add*'")
@click.option("--runtime", "runtimes", multiple=True, type=click.Choice(RUNTIMES), help="Repeats; both when not given.")
@click.option("--filter", "patterns", multiple=True, metavar="PATTERN", help="Only tests whose name matches; repeats.")
@click.option("--board", default="", metavar="ADDR|NAME", help="As for hil run (default: the simulator).")
@click.option("-j", "workers", type=click.IntRange(min=1), help="Compile so many at a time (default: one a core).")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write every result here as CSV.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def main(
    runtimes: tuple[str, ...],
    patterns: tuple[str, ...],
    board: str,
    workers: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Run the ONNX node tests through hil and print a table of outcomes.

    Ends with 0 when every outcome is explained, whatever it is: a runtime need not know every operator. With 3 when
    one is hil's own fault, with 5 when no test matches.
    """
    from rich.console import Console
    from rich.progress import Progress

    tests = node_tests(patterns or ("*",))
    if not tests:
        click.echo(f"no node test matches {', '.join(patterns)}", err=True)
        return EXIT_NOTHING_RAN
    choice = choose(board)
    results: list[NodeResult] = []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for runtime in runtimes or RUNTIMES:
            task = progress.add_task(runtime, total=len(tests))
            for result in run_tests(tests, runtime, choice, workers):
                results.append(result)
                progress.advance(task)
    if out:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(results[0])))
            writer.writeheader()
            writer.writerows(asdict(result) for result in results)
    unexplained = [result for result in results if not result.explained]
    if as_json:
        from hil.controller.cli.screen import print_json

        print_json({"schema": 1, "results": [asdict(result) for result in results], "unexplained": len(unexplained)})
    else:
        _print_table(Console(), results, unexplained)
    return EXIT_STAGE if unexplained else EXIT_OK


def _print_table(console: Any, results: list[NodeResult], unexplained: list[NodeResult]) -> None:
    from rich.table import Table

    runtimes = list(dict.fromkeys(result.runtime for result in results))
    counts = Counter((result.outcome, result.runtime) for result in results)
    table = Table("outcome", *runtimes, box=None)
    for outcome in sorted({result.outcome for result in results}, key=lambda name: (name != "PASS", name)):
        table.add_row(outcome, *(str(counts[outcome, runtime]) for runtime in runtimes))
    table.add_row("all", *(str(sum(result.runtime == runtime for result in results)) for runtime in runtimes))
    console.print(table)
    for result in unexplained[:_SHOWN]:
        console.print(f"unexplained: {result.runtime} {result.name}: {result.outcome} {result.reason}", markup=False)
    console.print(f"{len(unexplained)} unexplained")


if __name__ == "__main__":
    try:
        code = main(standalone_mode=False, prog_name="scripts/onnx-nodes")
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = EXIT_INTERRUPTED
    except HilError as error:
        click.echo(f"onnx-nodes: {error}", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    sys.stdout.flush()
    # onnxruntime's and onnx's threads have nothing to finish.
    os._exit(code if isinstance(code, int) else 0)
