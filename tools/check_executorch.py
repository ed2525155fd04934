"""Compare hil with ExecuTorch's backend tester on the tester's cases (`scripts/check-executorch`).

The tester compares with atol 0.1 and rtol 0.04, does not run undelegated programs, and skips tests with operators that
the portable kernels lack. hil runs all these tests with stricter tolerances. So hil's outcome may be worse than the
tester's result, but never better.
"""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedCrash, IsolatedError
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.torch_cases import TorchTest, list_torch_tests
from hil.controller.workloads.suites.reports.results import Delegation
from hil.controller.workloads.suites.request import BUILT_IN, SuiteRequest
from hil.controller.workloads.suites.store import SuiteRun
from hil.core.scratch import make_temporary_folder
from hil.errors import EXIT_FAIL, EXIT_NOTHING_RAN, EXIT_OK, EXIT_USAGE, HilError, UsageError
from tools import stock_executorch

TIMEOUT_SECONDS = 900.0
_SHOWN = 100
CRASHED = "CRASHED"
# Tester's result -> matching outcomes in hil.
OUTCOMES: Mapping[str, tuple[str, ...]] = {
    "SUCCESS": ("PASS",),
    "SUCCESS_UNDELEGATED": ("PASS",),
    "SKIPPED": ("IMPORT_ERROR", "SKIP"),
    "QUANTIZE_FAIL": ("COMPILE_ERROR", "COMPILE_CRASH", "IMPORT_ERROR"),
    "LOWER_FAIL": ("COMPILE_ERROR", "COMPILE_CRASH"),
    "PTE_LOAD_FAIL": ("LOAD_ERROR",),
    # The tester has one step for loading and running.
    "PTE_RUN_FAIL": ("LOAD_ERROR", "RUN_ERROR", "RUN_CRASH"),
    "OUTPUT_MISMATCH_FAIL": ("FAIL",),
    "UNKNOWN_FAIL": ("COMPILE_ERROR", "COMPILE_CRASH", "LOAD_ERROR", "RUN_ERROR"),
    CRASHED: ("COMPILE_CRASH", "RUN_CRASH"),
}
# Tester's results for programs that it does not run, and hil's outcomes for programs that hil could not lower.
_LEFT_ALONE = ("SKIPPED", "SUCCESS_UNDELEGATED")
_NOT_LOWERED = ("IMPORT_ERROR", "COMPILE_ERROR", "COMPILE_CRASH")
SAME = "the same"
STRICTER = "out of hil's tolerance, within the tester's"
NOT_RUN = "the tester does not run it"
DIFFERENT = "DIFFERENT"
KINDS = (SAME, STRICTER, NOT_RUN, DIFFERENT)


@dataclass(frozen=True)
class Finding:
    """Comparison of hil's outcome with the tester's result."""

    id: str
    kind: str
    hil: str
    tester: str


def compare_outcomes(record: CaseRecord, stock: Mapping[str, Any]) -> Finding:
    """Compare outcome and delegation of hil and the tester."""
    result, ended = stock["result"], record.ended
    told = f"{ended}: {record.message}" if record.message else ended
    words = f"{result}: {stock['message'][:300]}" if stock["message"] else result
    mine, other = _read_shares(record), _read_stock_shares(stock)
    if mine is not None and other is not None and mine != other:
        return Finding(record.id, DIFFERENT, f"{told}; {_format_shares(mine)}", f"{words}; {_format_shares(other)}")
    if result in _LEFT_ALONE and other is not None and ended in _NOT_LOWERED:
        kind = DIFFERENT
    elif ended in OUTCOMES[result]:
        kind = SAME
    elif result in _LEFT_ALONE:
        kind = NOT_RUN
    elif result == "SUCCESS" and ended == "FAIL":
        kind = STRICTER
    else:
        kind = DIFFERENT
    return Finding(record.id, kind, told, words)


Shares = tuple[dict[str, int], dict[str, int]]


def _read_shares(record: CaseRecord) -> Shares | None:
    """Return the delegated and undelegated operators, with names that both tools use."""
    shared = Delegation.of(record)
    return None if shared is None else (_normalize_names(shared.delegated), _normalize_names(shared.undelegated))


def _read_stock_shares(stock: Mapping[str, Any]) -> Shares | None:
    return (
        None
        if stock["delegated"] is None
        else (_normalize_names(stock["delegated"]), _normalize_names(stock["undelegated"]))
    )


def _normalize_names(counts: Mapping[str, int]) -> dict[str, int]:
    """Normalize operator names: ``aten.sin.default`` in hil is ``aten::sin`` in the tester."""
    return {name.replace("::", ".").removesuffix(".default"): count for name, count in counts.items()}


def _format_shares(shares: Shares) -> str:
    return f"delegated {shares[0]}, undelegated {shares[1]}"


def run_stock(test: TorchTest, flow: str, isolated: Isolated, log: Path) -> Mapping[str, Any]:
    """Return the tester's result for a test."""
    where = {name: getattr(test, name) for name in ("module", "function", "choice", "number")}
    nothing: dict[str, Any] = {"delegated": None, "undelegated": None, "outputs": []}
    if test.skipped or test.problem:
        return {**nothing, "result": "SKIPPED", "message": test.skipped or test.problem}
    try:
        found: Mapping[str, Any] = isolated.call(
            stock_executorch.run, {**where, "flow": flow}, timeout=TIMEOUT_SECONDS, log=log
        )
    except IsolatedError as error:
        result = CRASHED if isinstance(error, IsolatedCrash) else "UNKNOWN_FAIL"
        return {**nothing, "result": result, "message": error.message}
    return found


def make_stock_name(flow: str) -> str:
    """Return the tester's name for a flow of hil: ``xnnpack_static_int8_per_channel``, ``portable``."""
    return flow.removeprefix("executorch-").replace("-", "_")


@click.command(epilog="Example: scripts/check-executorch --flow xnnpack --filter 'add*'")
@click.argument("source", type=click.Choice(list(BUILT_IN)), default="@operators", metavar="@operators|@models")
@click.option("--flow", default="xnnpack", show_default=True, help="Flow of hil that the tester also supports.")
@click.option("--filter", "patterns", multiple=True, metavar="PATTERN", help="Filter as in hil suite run; repeatable.")
@click.option("--run", "stored", type=Path, metavar="DIR", help="Use this stored suite run instead of running hil.")
@click.option(
    "-j", "jobs", type=click.IntRange(min=1), metavar="N", help="Number of parallel jobs (default: one per core)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(
    source: str, flow: str, patterns: tuple[str, ...], stored: Path | None, jobs: int | None, as_json: bool
) -> int:
    """Run ExecuTorch's backend tester and hil on the same cases, and compare outcomes and delegation.

    The exit code is 1 if the tester's results differ from hil's, and 5 if no case matches.
    """
    suite = BUILT_IN[source]
    with make_temporary_folder("hil-check-") as folder, Isolated(jobs) as isolated:
        context = RunContext(Cache(), isolated)
        tests = {test.id: test for test in list_torch_tests(suite, load_flow(flow), context)}
        if stored is None:
            records = _run_hil(source, flow, patterns, jobs, Path(folder) / "run").read_records()
        else:
            records = read_records(stored, suite, flow, patterns)
        if not records:
            return EXIT_NOTHING_RAN
        if strange := next((record.id for record in records if record.id not in tests), None):
            raise UsageError(f"case {strange} of the flow {flow} not found in ExecuTorch's tester")
        log = Path(folder) / "stock.log"

        def check(record: CaseRecord) -> Finding:
            return compare_outcomes(record, run_stock(tests[record.id], make_stock_name(flow), isolated, log))

        with concurrent.futures.ThreadPoolExecutor(isolated.workers) as pool:
            findings = list(pool.map(check, records))
    counts = {kind: sum(one.kind == kind for one in findings) for kind in KINDS}
    if as_json:
        told = {"schema": 1, "suite": suite, "flow": flow, "counts": counts}
        print(json.dumps({**told, "cases": [asdict(one) for one in findings]}))
    else:
        _print(counts, findings)
    return EXIT_FAIL if counts[DIFFERENT] else EXIT_OK


def read_records(folder: Path, suite: str, flow: str, patterns: tuple[str, ...]) -> list[CaseRecord]:
    """Return the cases of a stored run that match the patterns."""
    run = SuiteRun.open(folder)
    if (has := (run.head.suite, run.head.flow)) != (suite, flow):
        raise UsageError(f"expected a run of {suite} with {flow}, got {' with '.join(has)} in {folder}")
    chosen = SuiteRequest(suite, filters=patterns)
    return [record for record in run.read_records() if chosen.selects(record.id)]


def _run_hil(source: str, flow: str, patterns: Sequence[str], jobs: int | None, out: Path) -> SuiteRun:
    command = [sys.executable, "-m", "hil.controller.cli.main", "suite", "run", source, "--flow", flow]
    command += [part for pattern in patterns for part in ("--filter", pattern)]
    command += ["--out", str(out), *(["-j", str(jobs)] if jobs else [])]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if not (out / "results.jsonl").exists():
        raise HilError(f"hil suite run failed with exit code {done.returncode}")
    return SuiteRun.open(out)


def _print(counts: Mapping[str, int], findings: Sequence[Finding]) -> None:
    for kind, count in counts.items():
        click.echo(f"{count:6}  {kind}")
    for one in [one for one in findings if one.kind in (DIFFERENT, STRICTER)][:_SHOWN]:
        click.echo(f"{one.id} ({one.kind})\n  hil:    {one.hil}\n  tester: {one.tester}")


if __name__ == "__main__":
    try:
        code = main(standalone_mode=False, prog_name="scripts/check-executorch")
    except HilError as error:
        click.echo(f"check-executorch: {error}", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = EXIT_USAGE
    sys.exit(code)
