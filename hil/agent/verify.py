"""`python -m hil.agent verify BUNDLE`: verify a bundle on the board, without a controller or a server.

Programs run in workers of the agent, so a crash fails one case and not the whole verification.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hil.agent import runtimes
from hil.agent.ipc import lay_out
from hil.agent.machine import describe_machine
from hil.agent.supervisor import Supervisor, WorkerProcess
from hil.bundles import Bundle, Method
from hil.bundles.cases import BundledCase, check_loaded, describe_untested, select_methods
from hil.bundles.signature import format_fingerprint, read_public_keys, verify
from hil.compare.criteria import parse_accept
from hil.compare.stats import summarize
from hil.compare.verdict import Verdict, compare, judge
from hil.core import tensors
from hil.core.crash import report_crash
from hil.core.results import Artifact, Outcome, Placement, Relation, RequestedDevice, RunResult, exit_code_of
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.core.text import convert_to_json
from hil.errors import EXIT_INTERRUPTED, HilError, RanElsewhere, RunCrashed, StageTimeout, UsageError, did_you_mean

_SCHEMA = 1


@dataclass(frozen=True)
class CaseResult:
    """Result of a case."""

    method: str
    case: str
    outcome: Outcome
    reason: str
    device_ns: int | None = None  # run time by the board's clock; None if the run failed
    verdict: Verdict | None = None  # comparison with the expected outputs; None if the run failed
    error: HilError | None = None  # error that ended the case
    placement: Placement | None = None  # devices that ran the nodes; None if the runtime does not report them
    elsewhere: str = ""  # note about nodes that did not run on the requested device; "" if none


def verify_bundle(
    bundle: Bundle,
    methods: Sequence[Method],
    *,
    device: str = "",
    timeout: float = 60.0,
    no_fallback: bool = False,
    watch: Callable[[CaseResult], None],
) -> list[CaseResult]:
    """Run all cases of these methods on this machine and compare the outputs with the expected outputs.

    Args:
        bundle: bundle with the program.
        methods: methods with the cases to run.
        device: device of the runtime; "" is the default.
        timeout: seconds for loading, and for every case.
        no_fallback: treat nodes that did not run on the requested device as an error.
        watch: callback for every result.

    Raises:
        UsageError: this machine does not have the bundle's runtime.
        StorageError: the program's files cannot be written to the temporary directory.
    """
    name = bundle.program.runtime
    known = runtimes.list_runtimes()
    if name not in known:
        raise UsageError(
            f"runtime {name!r} not found on this board",
            hint=f"{did_you_mean(name, known)}available runtimes: {', '.join(sorted(known))}",
        )
    supervisor = Supervisor({name: known[name]}, {})
    results = []
    try:
        with make_temporary_folder("hil-verify-") as folder:
            program = bundle.extract(Path(folder))
            for method in methods:
                running = _MethodRun(supervisor, Path(folder), program, method, device, timeout)
                for result in running.run_cases(no_fallback=no_fallback):
                    watch(result)
                    results.append(result)
    finally:
        supervisor.close()
    return results


class _MethodRun:
    """Worker of a method. The worker starts on demand and is replaced if a case kills it."""

    def __init__(
        self, supervisor: Supervisor, folder: Path, program: Artifact, method: Method, device: str, timeout: float
    ) -> None:
        self._supervisor = supervisor
        self._order = {"folder": str(folder), "main": program.main, "device": device, "function": method.name}
        self._program = program
        self._method = method
        self._timeout = timeout
        self._asked = RequestedDevice.of(program.runtime, program.flags, device)
        self._worker: WorkerProcess | None = None
        self._placement: Placement | None = None
        self._gives: Sequence[TensorSpec] = ()

    def run_cases(self, *, no_fallback: bool) -> Iterator[CaseResult]:
        """Yield the result of each case. If loading fails, all cases have that error."""
        unloadable: HilError | None = None
        try:
            for case in self._method.cases:
                try:
                    if unloadable is not None:
                        raise unloadable
                    yield self._run_case(self._worker or self._load(), case, no_fallback)
                except HilError as error:
                    if self._worker is None:
                        unloadable = error.locate(stage="load")
                    outcome = Outcome(error.outcome or "RUN_ERROR")
                    placed = self._placement if isinstance(error, RanElsewhere) else None
                    names = self._method.name, case.name
                    yield CaseResult(*names, outcome, error.message, error=error, placement=placed)
                    if isinstance(error, (RunCrashed, StageTimeout)):
                        self._end()
        finally:
            self._end()

    def _load(self) -> WorkerProcess:
        worker = self._supervisor.take(self._program.runtime, self._order["device"])
        try:
            found = worker.load(self._order, self._timeout, meanwhile=lambda: None)
            check_loaded(self._method.name, self._method.signature, list(found.inputs))
        except BaseException:
            worker.close()
            raise
        self._worker, self._gives = worker, found.outputs
        return worker

    def _run_case(self, worker: WorkerProcess, case: BundledCase, no_fallback: bool) -> CaseResult:
        outputs, device_ns = self._run(worker, case)
        self._placement = None if self._placement is None else self._asked.mark(self._placement)
        elsewhere = self._asked.check(self._placement, no_fallback=no_fallback)
        names = list(case.expected_outputs)
        if len(outputs) == len(names) == len(self._gives):
            triples = zip(outputs, case.expected_outputs.values(), self._gives, strict=True)
            outputs = [tensors.read_as(one, tensors.get_dtype_name(other.dtype), spec) for one, other, spec in triples]
        # The program may lack output names: use the bundle's names by position.
        named = dict(zip(names, outputs, strict=True)) if len(names) == len(outputs) else dict(enumerate(outputs))
        actual = RunResult("this board", {str(name): array for name, array in named.items()})
        source = case.source or "the bundle"
        expected = RunResult(
            source, case.expected_outputs, noise=case.noise, relation=case.relation, control=case.control
        )
        verdict = compare(actual, expected, rtol=case.rtol, atol=case.atol, accept=parse_accept(case.accept))
        outcome, reason = judge((verdict,), ())
        return CaseResult(
            self._method.name,
            case.name,
            outcome,
            reason,
            device_ns,
            verdict,
            placement=self._placement,
            elsewhere=elsewhere,
        )

    def _run(self, worker: WorkerProcess, case: BundledCase) -> tuple[list[Array], int]:
        entries, size = lay_out(worker.inputs, case.inputs.items())
        order = {"op": "invoke", "bytes": size, "inputs": entries, "warmup": 0, "iterations": 1}
        ran = worker.run(order, self._timeout, meanwhile=lambda: None)
        if ran.placement is not None:
            self._placement = ran.placement
        view = worker.view_outputs(ran.size)
        # These are views of memory that the next case overwrites, so compare them before the next case.
        outputs = [tensors.from_bytes(view[one.at : one.end], one.dtype, one.shape) for one in ran.outputs]
        return outputs, ran.end_ns[0] - ran.start_ns[0]

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = self._placement = None


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Return the exit code."""
    try:
        return _verify(_make_parser().parse_args(arguments))
    except KeyboardInterrupt:
        error: HilError = HilError("interrupted")
        code, kind = EXIT_INTERRUPTED, "Interrupted"
    except HilError as failed:
        error, code, kind = failed, failed.exit_code, type(failed).__name__
    except Exception as failed:
        error = report_crash(failed)
        code, kind = error.exit_code, type(error).__name__
    if "--json" in arguments:
        # The fields of hil.controller.records.commands.errors.ErrorDetails.
        found = {name: getattr(error, name) or "" for name in ("outcome", "hint", "stage", "board", "detail")}
        found = {"kind": kind, "message": error.message, **found}
        print(json.dumps({"schema": _SCHEMA, "error": found, "exit_code": code}))
    print(f"hil.agent: {error}", file=sys.stderr)
    return code


class _VerifyParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of ending the process."""
        raise UsageError(message, hint=f"{self.prog} --help lists the options")


def _make_parser() -> argparse.ArgumentParser:
    options = _VerifyParser(
        prog="python -m hil.agent verify",
        description="Run every case of a bundle on this machine and compare the outputs with the expected values.",
        epilog="Exit codes: 0 all passed, 1 an output differs, 2 bad bundle or usage, 3 a case failed to run, "
        "5 no cases to run, 70 internal error in hil.",
    )
    options.add_argument("bundle", type=Path, metavar="BUNDLE", help="a .hilb file")
    options.add_argument(
        "--method", action="append", default=[], metavar="M", help="run only this entry point; repeatable"
    )
    options.add_argument(
        "--case", action="append", default=[], metavar="C", help="run only this case (name or number); repeatable"
    )
    options.add_argument(
        "--trusted-keys", type=Path, metavar="FILE", help="reject bundles not signed with any of these keys"
    )
    options.add_argument("--device", default="", help="device of the runtime (default: the first)")
    options.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="timeout in seconds for loading, and for each case"
    )
    options.add_argument("--no-fallback", action="store_true", help="fail if any node runs on a different device")
    options.add_argument("--json", action="store_true", dest="as_json", help="print one JSON document on stdout")
    return options


def _verify(options: argparse.Namespace) -> int:
    if not 0 < options.timeout < math.inf:
        raise UsageError("--timeout must be above 0 seconds")
    bundle = Bundle.open(options.bundle)
    by = verify(bundle.head, read_public_keys(options.trusted_keys)) if options.trusted_keys else ""
    methods = select_methods(
        [bundle.method(name) for name in dict.fromkeys(options.method)] or bundle.methods, options.case
    )
    settings = {"device": options.device, "timeout": options.timeout, "no_fallback": options.no_fallback}
    show = (lambda result: None) if options.as_json else (lambda result: print(_line(result), flush=True))
    results = verify_bundle(bundle, methods, **settings, watch=show)
    code = exit_code_of(result.outcome for result in results)
    if options.as_json:
        document = {
            "schema": _SCHEMA,
            "bundle": str(options.bundle),
            "digest": bundle.digest,
            "signed_by": by,
            "machine": {"hostname": describe_machine().hostname, "arch": describe_machine().arch},
            "runtime": bundle.program.runtime,
            "cases": [_record(result) for result in results],
            "exit_code": code,
        }
        print(json.dumps(convert_to_json(document), indent=1, allow_nan=False))
        return code
    passed = sum(result.outcome is Outcome.PASS for result in results)
    if bundle.head.signature:
        print(
            f"signed by {by}"
            if by
            else f"claims to be signed by {format_fingerprint(bundle.head.public_key)}: not checked"
        )
    if missing := describe_untested(methods):
        print(missing)
    print(f"{passed} of {len(results)} cases passed on {describe_machine().hostname} ({describe_machine().arch})")
    return code


def _line(result: CaseResult) -> str:
    line = f"{result.outcome.value}  {result.method}/{result.case}"
    if result.verdict is not None and result.device_ns is not None:
        line += f"  {summarize(output.record() for output in result.verdict.outputs)}, {result.device_ns / 1e6:.3g} ms"
    if result.verdict is not None and result.verdict.relation is not Relation.INDEPENDENT:
        line += f"\n      against: {result.verdict.named}"
    if result.elsewhere:
        line += f"\n      note: {result.elsewhere}"
    if result.outcome is not Outcome.PASS:
        line += f"\n      {result.reason}"
    if result.error is not None and result.error.hint:
        line += f"\n      hint: {result.error.hint}"
    return line


def _record(result: CaseResult) -> dict[str, Any]:
    error = result.error
    return {
        "method": result.method,
        "case": result.case,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "against": None if result.verdict is None else result.verdict.against,
        "relation": None if result.verdict is None else result.verdict.relation.value,
        "device_ns": result.device_ns,
        "outputs": [output.record() for output in result.verdict.outputs] if result.verdict is not None else [],
        "placement": None if result.placement is None else [part.to_json() for part in result.placement],
        "elsewhere": result.elsewhere,
        "error": error and {"kind": type(error).__name__, "hint": error.hint, "detail": error.detail},
    }
