"""`hil layers`: list, cut and save a model's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.analysis.dispatches import dispatch_options, run_dispatches, split_dispatch_settings
from hil.controller.cli.analysis.node_data import export_layers, make_node_data_options
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, FOLDER, MODEL, group_option, json_option, run_options
from hil.controller.cli.screen import answer
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.analysis.layers import Layer
    from hil.controller.analysis.layers.values import SavedLayer
    from hil.controller.records.commands.models import LayerDescription
    from hil.core.tensors import TensorSpec

# Maximum length of the operators in the table.
_MAX_OP_LENGTH = 40


@make_command(epilog="Example: hil layers example:digits_cnn --group fused --save layers")
@click.argument("model", type=MODEL)
@group_option
@click.option(
    "--from", "start", default="", metavar="A", help="Cut out one part that starts at this tensor, node or layer."
)
@click.option("--to", "end", default="", metavar="B", help="End of the part: tensor, node or layer.")
@click.option("--save", type=FILE, metavar="DIR", help="Save models, their inputs and expected outputs.")
@make_node_data_options("max_abs")
@click.option(
    "--values",
    type=FOLDER,
    metavar="DIR",
    help="Source for --node-data: directory of a bisection (hil bisect --out) or suite run of this model.",
)
@run_options("dims", "inputs", "seed")
@dispatch_options
@json_option
def layers(
    model: Path,
    start: str,
    end: str,
    save: Path | None,
    node_data: Path | None,
    by: str,
    values: Path | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """List the layers of an ONNX MODEL, or cut out one part, and save them as separate models.

    A CPU reference computes the saved values in the whole model. --node-data exports the result of each layer, from a
    bisection or suite. Model Explorer colors the model's graph by these results.

    --dispatches runs each dispatch of the model's IREE program alone on a board, and compares the results with numpy.
    """
    if (dispatch_settings := split_dispatch_settings(settings)) is not None:
        return run_dispatches(model, dispatch_settings, as_json=as_json)
    from hil.controller.analysis.layers import TIMEOUT_SECONDS, compute_activations, cut, extract_layers
    from hil.controller.analysis.layers.values import save_layer
    from hil.controller.models.importers import import_model
    from hil.controller.models.inputs import make_inputs
    from hil.controller.pipeline.settings.given_inputs import find_inputs_file
    from hil.controller.records.commands.models import LayerList
    from hil.controller.storage.run_context import open_context

    if (node_data is None) is not (values is None):
        raise UsageError(
            "--node-data and --values require each other",
            hint="pass the directory of a bisection or suite run to --values",
        )
    with open_context(1) as tools, make_temporary_folder("hil-layers-") as scratch:
        how: dict[str, Any] = {"cache": tools.cache, "isolated": tools.isolated, "log": Path(scratch) / "layers.log"}
        read = import_model(model, dims=settings["dims"], isolated=tools.isolated, cache=tools.cache)
        inputs = None
        if read.inputs is not None and (save is not None or settings["inputs"]):
            file = find_inputs_file(model)
            given = settings["inputs"] or ((str(file),) if file else ())
            inputs = make_inputs(read.inputs, given, seed=settings["seed"], ranges=read.ranges, dims=read.dims)
        if start or end:
            found: tuple[Layer, ...] = (cut(read, start, end, group=settings["group"], inputs=inputs, **how),)
        else:
            found = extract_layers(read, group=settings["group"], inputs=inputs, **how)
        saved, written = [], []
        if save is not None and inputs is not None:
            computed = compute_activations(read, inputs, recompute=False, timeout=TIMEOUT_SECONDS, **how)
            saved = [save_layer(layer, computed, save) for layer in found]
        if node_data is not None and values is not None:
            written = export_layers(read, found, values, node_data, by, how)
    document = LayerList(model=str(model), layers=_describe_layers(found, saved), exit_code=0)
    which = "it" if len(saved) == 1 else "the first"
    lines = [f"saved in {save}; to run {which}:\n  {saved[0].command}"] if saved else []
    return answer(as_json, document, *lines, *written, show=lambda: _print_table(found))


def _describe_layers(found: Sequence[Layer], saved: Sequence[SavedLayer]) -> list[LayerDescription]:
    from hil.controller.analysis.layers import get_layer_specs
    from hil.controller.pipeline.records.record import record_specs
    from hil.controller.records.commands.models import LayerDescription, LayerFiles

    rows = []
    for number, layer in enumerate(found):
        takes, gives = map(record_specs, get_layer_specs(layer))
        row = LayerDescription(**{**vars(layer), "path": str(layer.path), "inputs": takes, "outputs": gives})
        if saved:
            one = saved[number]
            inputs, outputs = ([str(file) for file in side] for side in (one.inputs, one.outputs))
            row.saved = LayerFiles(model=str(one.model), inputs=inputs, outputs=outputs, run=one.command)
        rows.append(row)
    return rows


def _print_table(found: Sequence[Layer]) -> None:
    """Print layers with the same signature as one line with their count."""
    from hil.controller.analysis.layers import get_layer_specs
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.screen.texts import format_count, make_table

    copies = Counter(layer.same_as or layer.name for layer in found)
    rows = [
        (
            str(layer.depth),
            layer.name,
            shorten_op(layer.op),
            *_list_types(get_layer_specs(layer)),
            str(copies[layer.name]),
        )
        for layer in found
        if not layer.same_as
    ]
    make_table_console().print(
        make_table(("depth", "layer", "op", "inputs", "outputs", "x"), rows, numbers=("depth", "x"))
    )
    total = format_count(len(found), "layer")
    click.echo(f"{total} of {len(copies)} signatures" if len(copies) < len(found) else total)
    for layer in found:
        if layer.by_chance:
            click.echo(f"note: {layer.name} generates random numbers: runs give different values")


def shorten_op(op: str) -> str:
    """Return the operators of a layer, ``If+15 more+Add`` if there are many."""
    names = op.split("+")
    return op if len(op) <= _MAX_OP_LENGTH or len(names) < 3 else f"{names[0]}+{len(names) - 2} more+{names[-1]}"


def _list_types(sides: Iterable[Sequence[TensorSpec]]) -> list[str]:
    """Return the types of inputs and outputs. A tensor with unknown rank is ?."""
    from hil.core.tensors import type_text

    return [", ".join(type_text(spec.dtype, spec.shape) if spec.dtype else "?" for spec in side) for side in sides]
