"""Run the benchmarks in sequence, write the results to a JSON document, and print them as a table.

    scripts/bench                                     run all benchmarks: about an hour on a quiet machine
    scripts/bench invoke stream -o today.json         run some benchmarks
    scripts/bench -o today.json --resume              continue after Ctrl-C
    scripts/bench -o today.json --against before.json show changed ratios

Each benchmark is a separate process. Its results are written when it ends. Exit codes: 0, 1 if a benchmark ended with
an error, 2 for invalid usage, 130 for Ctrl-C. A missed limit does not change the exit code, because a busy machine
misses all limits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent
# In the order of the runs: short benchmarks first.
NAMES = (
    "start",
    "invoke",
    "cold",
    "model",
    "generate",
    "gate",
    "compare",
    "checks",
    "stream",
    "trace",
    "profiling",
    "serial",
    "compile_layers",
    "suite",
    "reduce",
    "ssh",
    "farm",
    "farm_queue",
    "web_readers",
    "web_farm",
    "web",
)


def main() -> int:
    """Run the benchmarks on the command line. Return the exit code."""
    parser = argparse.ArgumentParser(
        "scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: all): {', '.join(NAMES)}"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("bench.json"), help="output file (default: bench.json)"
    )
    parser.add_argument("--against", type=Path, metavar="FORMER", help="earlier document to compare with")
    parser.add_argument(
        "--resume", action="store_true", help="keep finished benchmarks of this commit in the output file"
    )
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in NAMES]:
        parser.error(f"unknown benchmark {', '.join(unknown)}: use one of {', '.join(NAMES)}")
    try:
        former = report.read(given.against) if given.against else None
        document = begun(given.output, resume=given.resume)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        run_all(document, given.names or NAMES, given.output)
    except KeyboardInterrupt:
        say(f"interrupted: {given.output} contains the finished benchmarks; use --resume to continue")
        return 130
    print_table(report.table(document), ("benchmark", "case", "hil", "rival", "rival's", "ratio", "bar", ""))
    if former is not None:
        print_changes(former, document)
    return 1 if any("error" in one for one in document["benchmarks"]) else 0


def begun(output: Path, *, resume: bool) -> dict[str, Any]:
    """Return the document to which results are added.

    Raises OSError and ValueError if a document to resume is invalid.
    """
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    document: dict[str, Any] = {"schema": report.SCHEMA, "made": made, "commit": commit, "benchmarks": []}
    if resume and output.exists():
        found = report.read(output)
        if found.get("commit") != commit:
            raise ValueError(f"expected commit {commit} in {output}, got {found.get('commit')}: omit --resume")
        return {**found, "benchmarks": [one for one in found["benchmarks"] if "error" not in one]}
    return document


def run_all(document: dict[str, Any], names: Sequence[str], output: Path) -> None:
    """Run the benchmarks that the document lacks. Write the document after each benchmark."""
    done = {one["benchmark"] for one in document["benchmarks"]}
    left = [name for name in names if name not in done]
    for number, name in enumerate(left, 1):
        say(f"{number} of {len(left)}: {name} ...")
        began = time.monotonic()
        found = run_one(name)
        document["benchmarks"].append(found)
        # Replace the file atomically, because Ctrl-C may interrupt the write.
        unfinished = output.with_name(f"{output.name}.part")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(output)
        say(f"{name} took {time.monotonic() - began:.0f} s" + (f": {found['error']}" if "error" in found else ""))


def run_one(name: str) -> dict[str, Any]:
    """Run a benchmark. Return its JSON document, or an error."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.returncode or not isinstance(found, dict):
        return {"benchmark": name, "error": f"exit code {done.returncode}; see the output above"}
    return found


def print_changes(former: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Print the ratios of both documents, and mark changes."""
    for line in report.machines_differ(former, now):
        print(f"different machine: {line}")
    rows = [
        (*one.key, report.number(one.former), report.number(one.now), one.bar, one.text)
        for one in report.changes(former, now)
    ]
    print_table(rows, ("benchmark", "case", "rival", "earlier ratio", "ratio", "bar", f"beyond {report.NOISE:.0%}"))


def print_table(rows: Sequence[Sequence[str]], heads: Sequence[str]) -> None:
    """Print a table. If stdout is not a terminal, the width is 180 characters."""
    from rich.console import Console
    from rich.table import Table

    shown = Table()
    for head in heads:
        shown.add_column(head)
    for row in rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 180).print(shown)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
