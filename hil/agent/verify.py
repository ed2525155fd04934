"""`python -m hil.agent verify BUNDLE`: a board checks itself against a bundle, with no controller and no server.

The program runs in a worker of the agent's own, so whatever it does costs one case and not the check.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.agent import runtimes
from hil.agent.ipc import aligned
from hil.agent.machine import machine
from hil.agent.supervisor import Supervisor, Worker
from hil.bundles import Bundle, Method
from hil.bundles.cases import BundledCase, check_loaded, untested
from hil.bundles.signature import fingerprint, public_keys, verify
from hil.compare.stats import summary
from hil.compare.verdict import Verdict, compare
from hil.core import tensors
from hil.core.results import Artifact, Outcome, Placement, RequestedDevice, RunResult, exit_code_of
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.core.text import jsonable
from hil.errors import EXIT_INTERRUPTED, HilError, RanElsewhere, RunCrashed, RunFailed, StageTimeout, UsageError

_SCHEMA = 1


@dataclass(frozen=True)
class CaseResult:
    """What a case came to."""

    method: str
    case: str
    outcome: Outcome
    reason: str
    device_ns: int | None = None  # how long it ran, by the board's clock; None where it did not come to its end
    verdict: Verdict | None = None  # beside what was expected; None where there was nothing to compare
    error: HilError | None = None  # what ended it instead
    placement: Placement | None = None  # where it ran; None where the runtime does not tell
    elsewhere: str = ""  # a note on what ran on another device than it was told to; "" where nothing did


def verify_bundle(
    bundle: Bundle,
    methods: Sequence[Method],
    *,
    device: str = "",
    timeout: float = 60.0,
    no_fallback: bool = False,
    watch: Callable[[CaseResult], None] = lambda result: None,
) -> list[CaseResult]:
    """Run every case of these methods here and compare what comes out with what is expected.

    Args:
        device: the runtime's; "" is its default.
        timeout: seconds for loading, and for each case.
        no_fallback: whether a node that runs on another device than it was told to is an error.

    Raises:
        UsageError: this machine has no such runtime.
        StorageError: the program's files cannot be written below the folder for temporary files.
    """
    name = bundle.program.runtime
    known = runtimes.known()
    if name not in known:
        raise UsageError(f"this board has no runtime {name!r}", hint=f"it has {', '.join(sorted(known))}")
    supervisor = Supervisor({name: known[name]}, {})
    results = []
    try:
        with temporary_folder("hil-verify-") as folder:
            program = bundle.extract(Path(folder))
            for method in methods:
                program = replace(program, function=method.name)
                running = _MethodRun(supervisor, Path(folder), program, method, device, timeout, no_fallback)
                for result in running.results():
                    watch(result)
                    results.append(result)
    finally:
        supervisor.close()
    return results


@dataclass
class _MethodRun:
    """A method's worker: made when it is needed, and anew after a case that cost it its life."""

    supervisor: Supervisor
    folder: Path
    program: Artifact
    method: Method
    device: str
    timeout: float
    no_fallback: bool
    _worker: Worker | None = None
    _placement: Placement | None = None
    _gives: Sequence[TensorSpec] = ()

    def results(self) -> Iterator[CaseResult]:
        """Each case, run and compared."""
        unloadable: HilError | None = None
        try:
            for case in self.method.cases:
                try:
                    worker = self._worker
                    if unloadable is None and worker is None:
                        try:
                            worker = self._worker = self._load()
                        except HilError as error:
                            unloadable = error.located(stage="load")
                    if unloadable is not None or worker is None:
                        raise unloadable or RunFailed("there is no worker")
                    yield self._result(worker, case)
                except HilError as error:
                    outcome = Outcome(error.outcome or "RUN_ERROR")
                    placed = self._placement if isinstance(error, RanElsewhere) else None
                    yield CaseResult(self.method.name, case.name, outcome, error.message, error=error, placement=placed)
                    if isinstance(error, (RunCrashed, StageTimeout)):
                        self._end()
        finally:
            self._end()

    def _load(self) -> Worker:
        worker = self.supervisor.take(self.program.runtime, self.device)
        try:
            order = {
                "folder": str(self.folder),
                "main": self.program.main,
                "device": self.device,
                "function": self.program.function,
            }
            found = worker.load(order, self.timeout, meanwhile=lambda: None)
            self._gives = found.outputs
            check_loaded(self.method.name, self.method.signature, list(found.inputs))
        except BaseException:
            worker.close()
            raise
        return worker

    def _result(self, worker: Worker, case: BundledCase) -> CaseResult:
        outputs, device_ns = self._run(worker, case)
        asked = RequestedDevice.of(self.program.runtime, self.program.flags, self.device)
        self._placement = None if self._placement is None else asked.mark(self._placement)
        elsewhere = asked.check(self._placement, no_fallback=self.no_fallback)
        names = list(case.expected_outputs)
        if len(outputs) == len(names) == len(self._gives):
            triples = zip(outputs, case.expected_outputs.values(), self._gives, strict=True)
            outputs = [tensors.read_as(one, tensors.dtype_name(other.dtype), spec) for one, other, spec in triples]
        # The program may know no names: they are the bundle's, in order.
        named = dict(zip(names, outputs, strict=True)) if len(names) == len(outputs) else dict(enumerate(outputs))
        actual = RunResult("this board", {str(name): array for name, array in named.items()})
        expected = RunResult(case.source or "the bundle", case.expected_outputs, noise=case.noise)
        verdict = compare(actual, expected, rtol=case.rtol, atol=case.atol)
        return CaseResult(
            self.method.name,
            case.name,
            verdict.outcome,
            verdict.reason,
            device_ns,
            verdict,
            placement=self._placement,
            elsewhere=elsewhere,
        )

    def _run(self, worker: Worker, case: BundledCase) -> tuple[list[Array], int]:
        datas = [tensors.to_bytes(array) for array in case.inputs.values()]
        size = sum(aligned(data.nbytes) for data in datas)
        view = worker.inputs.view(size, grow=True)
        entries = []
        at = 0
        for (name, array), data in zip(case.inputs.items(), datas, strict=True):
            view[at : at + data.nbytes] = data
            entry = {"name": name, "dtype": tensors.dtype_name(array.dtype), "shape": list(array.shape)}
            entries.append({**entry, "at": at, "bytes": data.nbytes})
            at += aligned(data.nbytes)
        order = {"op": "invoke", "bytes": size, "inputs": entries, "warmup": 0, "iterations": 1}
        ran = worker.run(order, self.timeout)
        if ran.placement is not None:
            self._placement = ran.placement
        view = worker.output_view(ran.size)
        # Views of memory that the next case's outputs are written into: they are compared before that.
        outputs = [tensors.from_bytes(view[one.at : one.at + one.size], one.dtype, one.shape) for one in ran.outputs]
        return outputs, ran.end_ns[0] - ran.start_ns[0]

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = self._placement = None


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _verify(options)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, options.as_json, "Interrupted")
    except HilError as error:
        return _fail(str(error), error.exit_code, options.as_json, type(error).__name__, error)


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m hil.agent verify",
        description="Run every case of a bundle on this machine and compare what comes out with what is expected.",
        epilog="Exit codes: 0 all passed, 1 an answer differs, 2 bad bundle or usage, 3 a case failed to run, "
        "5 there was no case to run.",
    )
    options.add_argument("bundle", type=Path, metavar="BUNDLE", help="a .hilb file")
    options.add_argument("--method", action="append", default=[], metavar="M", help="only this entry point; repeats")
    options.add_argument("--trusted-keys", type=Path, metavar="FILE", help="refuse what none of these keys has signed")
    options.add_argument("--device", default="", help="the runtime's device (default: its first)")
    options.add_argument("--timeout", type=float, default=60.0, metavar="S", help="limit of loading and of each case")
    options.add_argument(
        "--no-fallback", action="store_true", help="fail where any node runs on another device than it was told to"
    )
    options.add_argument("--json", action="store_true", dest="as_json", help="one JSON document on stdout")
    return options


def _verify(options: argparse.Namespace) -> int:
    if not 0 < options.timeout < math.inf:
        raise UsageError("--timeout must be above 0 seconds")
    bundle = Bundle.open(options.bundle)
    trusted = public_keys(options.trusted_keys) if options.trusted_keys else None
    by = verify(bundle.head, trusted) if trusted is not None else ""
    methods = [bundle.method(name) for name in dict.fromkeys(options.method)] or list(bundle.methods)

    def show(result: CaseResult) -> None:
        if not options.as_json:
            print(_line(result), flush=True)

    settings = {"device": options.device, "timeout": options.timeout, "no_fallback": options.no_fallback}
    results = verify_bundle(bundle, methods, **settings, watch=show)
    code = exit_code_of(result.outcome for result in results)
    if options.as_json:
        document = {
            "schema": _SCHEMA,
            "bundle": str(options.bundle),
            "digest": bundle.digest,
            "signed_by": by,
            "machine": {"hostname": machine().hostname, "arch": machine().arch},
            "runtime": bundle.program.runtime,
            "cases": [_record(result) for result in results],
            "exit_code": code,
        }
        print(json.dumps(jsonable(document), indent=1, allow_nan=False))
        return code
    passed = sum(result.outcome is Outcome.PASS for result in results)
    if bundle.head.signature:
        print(f"signed by {by}" if by else f"claims to be signed by {fingerprint(bundle.head.public_key)}: not checked")
    if missing := untested(methods):
        print(missing)
    print(f"{passed} of {len(results)} cases passed on {machine().hostname} ({machine().arch})")
    return code


def _line(result: CaseResult) -> str:
    line = f"{result.outcome.value}  {result.method}/{result.case}"
    if result.verdict is not None and result.device_ns is not None:
        line += f"  {summary(output.record() for output in result.verdict.outputs)}, {result.device_ns / 1e6:.3g} ms"
    if result.elsewhere:
        line += f"\n      note: {result.elsewhere}"
    if result.outcome is not Outcome.PASS:
        line += f"\n      {result.reason}"
    if result.error is not None and result.error.hint:
        line += f"\n      hint: {result.error.hint}"
    return line


def _record(result: CaseResult) -> dict[str, Any]:
    return {
        "method": result.method,
        "case": result.case,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "device_ns": result.device_ns,
        "outputs": [output.record() for output in result.verdict.outputs] if result.verdict is not None else [],
        "placement": None if result.placement is None else [part.to_json() for part in result.placement],
        "elsewhere": result.elsewhere,
        "error": result.error
        and {"kind": type(result.error).__name__, "hint": result.error.hint, "detail": result.error.detail},
    }


def _fail(text: str, code: int, as_json: bool, kind: str, error: HilError | None = None) -> int:
    if as_json:
        found = {"kind": kind, "message": error.message if error else text, "hint": error.hint if error else ""}
        print(json.dumps({"schema": _SCHEMA, "error": found, "exit_code": code}))
    print(f"hil.agent: {text}", file=sys.stderr)
    return code
