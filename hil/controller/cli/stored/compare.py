"""`hil compare`: compare two stored runs or two .npy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, json_option, run_option, run_options, runs_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_runs
from hil.errors import UsageError


@make_command(epilog="Example: hil compare actual.npy expected.npy --rtol 1e-3 --plot diff.png")
@click.argument("a", shell_complete=complete_runs)
@click.argument("b", shell_complete=complete_runs)
@run_option("rtol", help="Relative tolerance (default: by dtype).")
@run_option("atol", help="Absolute tolerance (default: by dtype).")
@run_options("accept", "allow_blind", "allow_flush")
@click.option("--plot", type=FILE, metavar="PNG", help="Plot the differences of the worst output.")
@runs_option
@json_option
def compare(a: str, b: str, as_json: bool, plot: Path | None, out: Path | None, **tolerance: Any) -> int:
    """Compare the outputs of A with the outputs of B, the reference. A and B are .npy files or IDs of stored runs."""
    from hil.compare.tolerance import check_tolerance
    from hil.compare.verdict import Verdict
    from hil.compare.verdict import compare as compare_results
    from hil.controller.pipeline.records.next_steps import make_blind_hint
    from hil.controller.pipeline.records.print_case import print_verdict
    from hil.controller.pipeline.records.record import record_verdict
    from hil.controller.pipeline.verdicts.accepting import load_rules
    from hil.controller.records.commands.models import CompareResult
    from hil.controller.storage.screen.console import Console
    from hil.controller.storage.screen.texts import print_labelled as say_line
    from hil.core.results import Outcome, exit_code_of

    check_tolerance(tolerance["rtol"], tolerance["atol"])
    tolerance["accept"] = load_rules(tolerance["accept"])
    left, right = _read_results(a, out), _read_results(b, out)
    if len(left) == len(right) == 1:
        right = dict(zip(left, right.values(), strict=True))
    pairs = [(name, one, other) for name, one in left.items() if one and (other := right.get(name))]
    if not pairs:
        raise UsageError(f"{a} and {b} have no case in common", hint="hil runs show ID lists a run's cases")
    verdicts = {name: compare_results(one, other, **tolerance) for name, one, other in pairs}
    for name in {**left, **right}:
        # A case without outputs in both runs cannot be compared, so it fails.
        having = [which for which, results in ((a, left), (b, right)) if results.get(name)]
        if len(having) < 2:
            who = f"only {having[0]} has" if having else "neither run has"
            verdicts[name] = Verdict(Outcome.FAIL, b, (), f"{who} outputs for this case")
    code = exit_code_of(verdict.outcome for verdict in verdicts.values())
    drawn = plot and _draw(plot, pairs, verdicts)
    records = {name: record_verdict(verdict) for name, verdict in verdicts.items()}

    def show() -> None:
        console = Console()
        for name, record in records.items():
            colour = "green" if record.outcome is Outcome.PASS else "red"
            console.print(f"[bold {colour}]{record.outcome.value}[/]", end="  ")
            console.print(name, markup=False, highlight=False)
            print_verdict(console, record)
            if record.outcome is Outcome.BLIND:
                say_line(console, "hint", make_blind_hint(record))

    document = CompareResult(verdicts=records, plot=str(plot) if drawn else None, exit_code=code)
    return answer(as_json, document, *([f"  plot in      {plot}"] if drawn else ()), show=show)


def _draw(plot: Path, pairs: list[tuple[str, Any, Any]], verdicts: dict[str, Any]) -> bool:
    """Draw the worst drawable output. If none is drawable, print the reason to stderr and return False."""
    from hil.controller.analysis.plot import is_drawable, plot_difference
    from hil.controller.storage.runs import convert_write_errors

    found = []
    for case, one, other in pairs:
        by_name = one.outputs.keys() == other.outputs.keys()
        arrays = zip(one.outputs.values(), other.outputs.values(), strict=False)
        for output, (actual, reference) in zip(verdicts[case].outputs, arrays, strict=False):
            wanted = other.outputs[output.name] if by_name else reference
            found.append((not output.passed, output.max_abs or 0, output, actual, wanted))
    drawable = [item for item in found if is_drawable(item[2])]
    if not drawable:
        why = [f"{output.name}: {output.reason or f'the values are {output.dtype}s'}" for *_, output, _, _ in found]
        why = why or [verdict.reason for verdict in verdicts.values()]
        print_message(f"hil: no plot written: {'; '.join(why[:3])}")
        return False
    _, _, output, actual, reference = max(drawable, key=lambda item: item[:2])
    with convert_write_errors(plot.parent.absolute(), "--plot"):
        plot_difference(plot, output.name, actual, reference, output)
    return True


def _read_results(name: str, out: Path | None) -> dict[str, Any]:
    """Return results by case from a stored run or .npy file; None for a case without outputs."""
    from hil.controller.storage.runs import RunStore
    from hil.core.npy import load_npy
    from hil.core.results import RunResult

    if name.endswith(".npy"):
        return {"output": RunResult(name, {"output": load_npy(Path(name), mmap=True)})}
    run = RunStore(out).open(name)
    cases = {case.name: run.load_tensors(case.outputs) for case in run.record.cases}
    if not any(cases.values()):
        raise UsageError(f"run {run.id} has no outputs: {run.record.outcome and run.record.outcome.value}")
    return {case: RunResult(run.id, outputs) if outputs else None for case, outputs in cases.items()}
