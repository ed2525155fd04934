"""Run fuzzers: scripts/fuzz [NAME...] [--seconds N] [--seed N] [--jobs N] [--corpus DIR] [--json FILE] [--list].

Each runs in a process of its own that is watched from outside. What breaks something is kept in DIR/NAME/failures, with
the command that tries it again; what taught something in DIR/NAME/corpus, where the next run begins. Exit code 1 if
anything was broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from fuzzing.engine import confine
from fuzzing.runs import Report, drive, replay, work
from fuzzing.targets import FUZZERS


def _arguments() -> argparse.Namespace:
    import platformdirs

    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="fuzzers to run (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds per fuzzer (default: 60)")
    parser.add_argument("--inputs", type=int, default=0, help="maximum inputs per fuzzer; 0: unlimited")
    parser.add_argument("--seed", type=int, default=None, help="random seed (default: the current time)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="parallel fuzzers (default: one per core)"
    )
    parser.add_argument("--corpus", type=Path, default=platformdirs.user_cache_path("hil-fuzz"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--list", action="store_true", help="list the fuzzers")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="repeat one stored input")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in FUZZERS]:
        parser.error(f"unknown fuzzer {unknown[0]!r}: use one of {', '.join(FUZZERS)}")
    if given.replay is not None and len(given.names) != 1:
        parser.error("--replay requires the name of one fuzzer")
    return given


def main() -> int:
    """Run what the command line says."""
    given = _arguments()
    chosen = [FUZZERS[name] for name in given.names or FUZZERS]
    seed = int(time.time()) if given.seed is None else given.seed
    if given.work:
        faulthandler.enable()
        folder, note, first, last, seconds = given.work
        numbers = {"first": int(first), "last": int(last), "seconds": float(seconds)}
        work(chosen[0], Path(folder), seed=seed, note=Path(note), **numbers)
        return 0
    if given.list:
        width = max(map(len, FUZZERS))
        for one in chosen:
            lacking = one.lacking()
            print(f"{one.name:{width}}  {one.about}{f' (skipped here: {lacking})' if lacking else ''}")
        return 0
    if given.replay is not None:
        confine(chosen[0])
        failure = replay(chosen[0], given.replay)
        print(f"{failure.kind}\n{failure.text}" if failure else "no failure")
        return 1 if failure else 0
    print(f"seed {seed}; corpus in {given.corpus}")
    with ThreadPoolExecutor(given.jobs) as pool:
        how = {"seed": seed, "seconds": given.seconds, "inputs": given.inputs}
        runs = [pool.submit(drive, one, given.corpus / one.name, **how) for one in chosen]
        reports = []
        for run in runs:
            reports.append(run.result())
            _show(reports[-1], given.corpus)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in reports], indent=1))
    broken = sum(len(one.failures) for one in reports)
    print(f"{sum(one.messages for one in reports):,} messages and files, {broken} kinds of failure")
    return 1 if broken else 0


def _show(report: Report, corpus: Path) -> None:
    if report.skipped:
        print(f"{report.name}: skipped: {report.skipped}", flush=True)
        return
    ended = f", {report.ended_alone} ended the process" if report.ended_alone else ""
    print(
        f"{report.name}: {report.messages:,} in {report.seconds:.0f} s ({report.messages / report.seconds:,.0f}/s), "
        f"{len(report.kinds)} kinds of outcome, corpus of {report.corpus}, slowest {report.slowest_s:.2f} s, "
        f"memory growth up to {report.most_mib} MiB{ended}; {len(report.failures)} kinds of failure",
        flush=True,
    )
    for name, count in report.failures.items():
        print(f"  {count} times {corpus / report.name / 'failures' / name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
