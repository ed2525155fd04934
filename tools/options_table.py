"""Write docs/options.md: the options of each workload, and the reasons why a workload lacks an option.

Run as ``python -m tools.options_table``. A test compares the file with the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from hil.controller.cli.main import cli
from hil.testing.pytest_plugin.options import OPTIONS

PAGE = Path(__file__).parents[1] / "docs/options.md"
PYTEST = "pytest"
# Command -> column of the table.
WORKLOADS = {
    "run": "run",
    "suite run": "suite",
    PYTEST: "pytest",
    "bundle run": "bundle",
    "bench": "bench",
    "trace run": "trace",
    "farm submit": "farm",
}
# Option -> workload -> name of the option in this workload, if it differs.
RENAMED = {"--layers": {PYTEST: "--no-layers"}, "--timeout": {"farm submit": "--run-timeout"}}


@dataclass(frozen=True)
class Gap:
    """Workloads that lack options, with the reason."""

    options: tuple[str, ...]
    workloads: tuple[str, ...]
    reason: str


_STORED = ("bundle run", "trace run")
# Options in the table in addition to the options of `hil run`.
_MORE = (
    *("--confirm", "--each-board", "--filter", "--flow", "--group", "--keep-all", "--layers", "--layer-inputs"),
    *("--known", "--merge", "--only-expected-failures"),
)
_SIMULATOR = ("--fault", "--sandbox", "--fresh")
_SSH = ("--identity", "--known-hosts", "--accept-new-host-key")
GAPS = (
    Gap(
        ("--function", "--dim", "--reference"), ("bundle run",), "The bundle contains the functions, sizes and outputs."
    ),
    Gap(("--device",), ("suite run", "pytest"), "The flow or the board config selects the device."),
    Gap(("--input", "--seed", "--input-range", "--expected"), _STORED, "The file contains the inputs and outputs."),
    Gap(("--require-independent",), ("trace run",), "The trace contains the outputs to compare with."),
    Gap(("--function", "--dim", "--reference"), ("trace run",), "The trace contains the calls, sizes and outputs."),
    Gap(
        ("--runtime",),
        _STORED,
        "The program is compiled for one runtime. Select the runtime with `hil bundle create --runtime`.",
    ),
    Gap(
        ("--compile-flag", "--debug-ir", "--debug-ir-passes", "--recompute-cache"),
        ("bundle run",),
        "The bundle contains a compiled program.",
    ),
    Gap(("--energy",), _STORED, "Measure the energy with `hil run` or `hil bench`."),
    Gap(("--compile-time-profile",), ("bundle run",), "The bundle contains a compiled program."),
    Gap(
        ("--function", "--input", "--expected"),
        ("suite run", PYTEST),
        "These options apply to one model. A suite reads files next to each model (docs/suites.md).",
    ),
    Gap(
        ("--generate",),
        ("suite run", PYTEST),
        "This option applies to one model. A suite reads `NAME.generate.toml` next to each model (docs/suites.md).",
    ),
    Gap(
        ("--generate",),
        _STORED,
        "The file contains calls, not prompts. `hil bundle create --generate` stores each call of a prompt as a case.",
    ),
    Gap(
        ("--instructions",),
        ("suite run", PYTEST, *_STORED),
        "Reports of several cases do not show counts. Use `hil run` or `hil bench` for a model.",
    ),
    Gap(("--flagfile",), ("suite run", PYTEST), "hil runs each flag file in the directory as a case."),
    Gap(("--flagfile",), _STORED, "The file contains the inputs."),
    Gap(
        ("--profile", "--compile-time-profile"),
        ("bench", "trace run"),
        "Profiling changes the measured times; use `hil run`.",
    ),
    Gap(("--profile",), ("bundle run",), "Run the program of `hil bundle extract` with `hil run --profile`."),
    Gap(
        ("--debug-ir", "--debug-ir-passes"),
        ("farm submit",),
        "A job does not return these files. Use `hil run --board farm:SELECTOR`.",
    ),
    Gap(
        (*_SIMULATOR, "--runtime-hw-type"),
        ("farm submit",),
        "The farm's host starts the simulators and connects to the boards. Select a board with `--select`.",
    ),
    Gap(_SSH, ("farm submit",), "The farm's host, not your machine, connects to the boards."),
    Gap(("--resume", "--out"), ("farm submit",), "The farm continues jobs and stores results: `hil farm result`."),
    Gap(("--resume",), (PYTEST,), "Use `pytest --last-failed`."),
    Gap(("--verbose",), ("farm submit",), "Use `--wait`, or `hil farm logs -f`."),
    Gap(
        ("--each-board",),
        ("farm submit",),
        "Not necessary: with several `--board` options, each board runs all cases.",
    ),
    Gap(("--only-expected-failures",), ("farm submit",), "Select cases with `--filter`."),
    Gap(
        ("--known",),
        ("farm submit",),
        "The farm's host cannot read your file. `hil web` shows the triage of a farm's results.",
    ),
    Gap(("--resume",), ("bench",), "An interrupted bench reports the measurements so far. Repeat the command."),
    Gap(("--resume",), _STORED, "An interrupted run keeps the finished cases. Repeat the command."),
    Gap(("--json",), (PYTEST,), "Use `--hil-out` or `--junit-xml`."),
    Gap(("--verbose",), (PYTEST,), "Use `pytest -s`."),
    Gap(("--filter",), (PYTEST,), "Use `pytest -k`."),
    Gap(
        (*_MORE,),
        ("run", "bench", *_STORED),
        "These options select or repeat the cases of a suite. `hil suite run MODEL` has them.",
    ),
)


def list_options() -> dict[str, set[str]]:
    """Return option -> workloads with this option, for the options of `hil run` and suites."""
    found: dict[str, set[str]] = {}
    for command in WORKLOADS:
        for option in _list_command_options(command):
            found.setdefault(option, set()).add(command)
    shown = {*_list_command_options("run"), *_MORE}
    return {option: commands for option, commands in sorted(found.items()) if option in shown}


def _list_command_options(command: str) -> Iterator[str]:
    names = {own: option for option, others in RENAMED.items() for where, own in others.items() if where == command}
    if command == PYTEST:
        options = [f"--{option.name.removeprefix('--hil-')}" for option in OPTIONS]
    else:
        options = [name for param in _find_command(command).params for name in _list_long_names(param)]
    yield from (names.get(option, option) for option in options)


def _find_command(path: str) -> click.Command:
    command: click.Command = cli
    for name in path.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


def _list_long_names(param: click.Parameter) -> list[str]:
    return [name for name in param.opts if name.startswith("--")][:1] if isinstance(param, click.Option) else []


def find_gaps(options: Mapping[str, set[str]]) -> dict[tuple[str, str], str]:
    """Return (option, workload) -> reason, for each option that a workload lacks.

    The reason is "" if none is listed.
    """
    reasons = {(option, command): gap.reason for gap in GAPS for option in gap.options for command in gap.workloads}
    return {
        (option, command): reasons.get((option, command), "")
        for option, commands in options.items()
        for command in WORKLOADS
        if command not in commands
    }


def find_unused_reasons(options: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return (option, workload) of each listed reason whose workload has the option."""
    named = [(option, command) for gap in GAPS for option in gap.options for command in gap.workloads]
    gaps = find_gaps(options)
    return [one for one in named if one not in gaps]


def write_page() -> str:
    """Return the page."""
    options = list_options()
    gaps = find_gaps(options)
    notes: dict[str, int] = {}
    rows = ["| Option | " + " | ".join(WORKLOADS.values()) + " |", "|---" * (len(WORKLOADS) + 1) + "|"]
    for option, commands in options.items():
        cells = []
        for command in WORKLOADS:
            if command in commands:
                cells.append(f"`{own}`" if (own := RENAMED.get(option, {}).get(command, option)) != option else "yes")
            else:
                number = notes.setdefault(gaps[option, command], len(notes) + 1)
                cells.append(f"({number})")
        rows.append(f"| `{option}` | " + " | ".join(cells) + " |")
    reasons = [f"{number}. {reason}" for reason, number in notes.items()]
    parts = [_HEAD, "\n".join(rows), "## Reasons for missing options", "\n".join(reasons)]
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# Options by workload

This page lists the options of `hil run` and of suites. If a workload does not have an option, a number refers to the
reason below the table.

An option has the same name and meaning in all workloads. Exceptions in `hil farm submit`: `--board` selects a board of
the farm, `--wait` waits for the results, `--timeout` limits the time on a board, and `--profile` and
`--compile-time-profile` have no directory. In pytest, most names start with `--hil-`."""


if __name__ == "__main__":
    PAGE.write_text(write_page())
    print(PAGE, file=sys.stderr)
