"""`hil compare`: two stored runs or two .npy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.options import json_option


@click.command(epilog="Example: hil compare actual.npy expected.npy --rtol 1e-3 --plot diff.png")
@click.argument("a")
@click.argument("b")
@click.option("--rtol", type=float, help="Relative tolerance (default: by dtype).")
@click.option("--atol", type=float, help="Absolute tolerance (default: by dtype).")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="PNG", help="A picture of where the worst output differs."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where runs are stored (default: hil-runs)."
)
@json_option
def compare(a: str, b: str, as_json: bool, plot: Path | None, out: Path | None, **tolerance: float | None) -> int:
    """Compare the outputs of A with those of B, the reference. Each is a .npy file or a stored run's ID."""
    from rich.console import Console

    from hil.controller import compare as comparer
    from hil.controller.cli.screen import print_json
    from hil.controller.report import print_verdict, verdict_record
    from hil.controller.runs import storing
    from hil.results import exit_code_of

    comparer.check_tolerance(tolerance["rtol"], tolerance["atol"])
    left, right = _results(a, out), _results(b, out)
    pairs = [(name, left[name], right[name]) for name in left if name in right]
    if len(left) == len(right) == 1:
        pairs = [(next(iter(left)), next(iter(left.values())), next(iter(right.values())))]
    if not pairs:
        from hil.errors import UsageError

        raise UsageError(f"{a} and {b} have no case in common", hint="hil runs show ID lists a run's cases")
    verdicts = {name: comparer.compare(one, other, **tolerance) for name, one, other in pairs}
    code = exit_code_of(verdict.outcome for verdict in verdicts.values())
    if plot:
        from hil.controller.plot import plot_difference

        name, one, other = next((pair for pair in pairs if not verdicts[pair[0]]), pairs[0])
        index, output = max(
            enumerate(verdicts[name].outputs), key=lambda item: (not item[1].passed, item[1].max_abs or 0)
        )
        with storing(plot.parent):
            plot_difference(plot, output.name, [*one.outputs.values()][index], [*other.outputs.values()][index], output)
    records: dict[str, Any] = {name: verdict_record(verdict) for name, verdict in verdicts.items()}
    if as_json:
        print_json({"schema": 1, "verdicts": records, "plot": plot and str(plot), "exit_code": code})
        return code
    console = Console()
    for name, record in records.items():
        console.print(f"[bold {'green' if record['outcome'] == 'PASS' else 'red'}]{record['outcome']}[/]", end="  ")
        console.print(name, markup=False, highlight=False)
        print_verdict(console, record)
    if plot:
        console.print(f"  plot in      {plot}", markup=False, highlight=False, soft_wrap=True)
    return code


def _results(name: str, out: Path | None) -> dict[str, Any]:
    """Case name -> its result, from a stored run or a .npy file."""
    from hil.controller.runs import RunStore
    from hil.errors import UsageError
    from hil.results import RunResult
    from hil.tensors import load_npy

    if name.endswith(".npy"):
        return {"output": RunResult(name, {"output": load_npy(Path(name), mmap=True)})}
    run = RunStore(out).open(name)
    found = {case["name"]: run.load_tensors(case["outputs"]) for case in run.record["cases"] if case["outputs"]}
    if not found:
        raise UsageError(f"run {run.id} has no outputs: {run.record['outcome']}")
    return {case: RunResult(run.id, outputs) for case, outputs in found.items()}
