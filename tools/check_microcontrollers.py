"""Run the example models layer by layer on emulated microcontrollers (`scripts/check-microcontrollers`).

A layer passes, fails, or does not fit into the chip. For a layer that does not fit, the result has the missing memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from hil.controller.records.suite import CaseRecord, make_case_record
from hil.core.processes import make_module_command
from hil.core.scratch import make_temporary_folder
from hil.errors import EXIT_FAIL, EXIT_OK, HilError
from tools.virtual_board.microcontroller import start_microcontroller

EXAMPLES = Path(__file__).parents[1] / "examples"
CHIPS = ("cortex-m55", "cortex-m4")
DIGITS = "digits_cnn"
MODELS = (DIGITS, "resnet8", "ds_cnn", "mobilenet", "autoencoder", "decoder_step")
FITS, FAILS, TOO_LARGE = "pass", "fail", "do not fit"
_NO_ROOM = "the program does not fit into"


@dataclass(frozen=True)
class LayerCheck:
    """Result of a layer, or of a whole model."""

    chip: str
    case: str
    result: str  # FITS, FAILS or TOO_LARGE
    outcome: str
    message: str


def write_models(names: Sequence[str], folder: Path) -> None:
    """Write models as float32 and int8."""
    folder.mkdir(parents=True, exist_ok=True)
    if DIGITS in names:
        for path in (EXAMPLES / "digits" / f"{DIGITS}.onnx", EXAMPLES / "digits" / f"{DIGITS}_int8.onnx"):
            shutil.copy(path, folder)
    if made := [name for name in names if name != DIGITS]:
        script = EXAMPLES / "microcontrollers" / "make.py"
        subprocess.run([sys.executable, script, "--out", folder, "--int8", *made], check=True, capture_output=True)


def check_layers(
    chip: str, config: Path, models: Path, out: Path, environment: Mapping[str, str] | None = None
) -> list[LayerCheck]:
    """Run all models in a directory, and all their layers, on the board of a config.

    Args:
        out: directory for the suite's results.
        environment: variables of the command, instead of this process's variables.

    Raises:
        HilError: the suite did not run.
    """
    command = ["suite", "run", str(models), "--board", str(config), "--timeout", "600", "--out", str(out), "--json"]
    done = subprocess.run(make_module_command("hil", *command), capture_output=True, text=True, env=environment)
    results = out / "results.jsonl"
    if not results.exists():
        raise HilError(f"the suite did not run on {chip}", detail=done.stderr)
    records = [make_case_record(json.loads(line)) for line in results.read_text().splitlines()]
    return [_judge(chip, record) for record in records]


def _judge(chip: str, record: CaseRecord) -> LayerCheck:
    outcome = str(record.outcome)
    result = FITS if outcome == "PASS" else TOO_LARGE if _NO_ROOM in record.message else FAILS
    return LayerCheck(chip, record.id, result, outcome, record.message)


@click.command()
@click.argument("names", nargs=-1, metavar="[MODEL]...", type=click.Choice(MODELS))
@click.option("--chip", "chips", multiple=True, type=click.Choice(CHIPS), help="Default: both chips.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write all results as JSON.")
def cli(names: tuple[str, ...], chips: tuple[str, ...], out: Path | None) -> None:
    """Run the example models and all layers, in float32 and int8, on an emulated Cortex-M55 and Cortex-M4.

    Example: scripts/check-microcontrollers ds_cnn --chip cortex-m4
    """
    found: list[LayerCheck] = []
    with make_temporary_folder("hil-check-mcu-") as place:
        for name in names or MODELS:
            models = Path(place) / "models" / name
            write_models([name], models)
            for chip in chips or CHIPS:
                board = start_microcontroller(Path(place) / chip, chip)
                try:
                    checked = check_layers(chip, board.config, models, Path(place) / "runs" / f"{name}-{chip}")
                finally:
                    board.down()
                found += checked
                counts = Counter(one.result for one in checked)
                text = ", ".join(f"{counts[result]} {result}" for result in (FITS, FAILS, TOO_LARGE))
                click.echo(f"{name:<14}{chip:<12}{text}")
                for one in checked:
                    if one.result != FITS:
                        click.echo(f"  {one.outcome} {one.case}: {one.message}")
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    sys.exit(EXIT_FAIL if any(one.result == FAILS for one in found) else EXIT_OK)


if __name__ == "__main__":
    cli()
