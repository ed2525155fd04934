"""`hil bundle`: a program and the test cases in a file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import group
from hil.controller.cli.options import (
    FILE,
    MODEL,
    add_project_settings,
    arithmetic_option,
    board_options,
    cache_options,
    choose_board,
    iteration_options,
    json_option,
    label_option,
    limit_options,
    run_option,
    run_options,
    run_settings,
    runs_option,
    split_targets,
    target_options,
    tolerance_options,
    verbose_option,
    wait_option,
)
from hil.controller.cli.screen import Screen, answer, answer_matrix, print_message
from hil.controller.cli.usage.candidates import choose_names
from hil.controller.storage.paths import path_exists
from hil.core.files import suggest_path
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.bundles import Bundle
    from hil.controller.devices.board import Board

_complete_format = choose_names("onnx", "flagfile", "golden", "bpte")
_sign = click.option("--sign", "signing_key", type=FILE, metavar="KEY", help="Private ed25519 key to sign the bundle.")

_BUNDLE = click.argument("bundle", type=FILE)
_method = click.option("--method", "methods", multiple=True, metavar="M", help="Run only this entry point. Repeatable.")
_case = click.option(
    "--case",
    "cases",
    multiple=True,
    metavar="NAME",
    help="Run only this case: name, number, or METHOD/NAME. Repeatable.",
)
_key = click.option("--key", type=FILE, metavar="PUB", help="Require a signature by an ed25519 key in this file.")


@group(epilog="Example: hil bundle create example:digits_cnn --cases 3")
def bundle() -> None:
    """Bundle a program with its test cases in a .hilb file, and check boards with it."""


@bundle.command(epilog="Example: hil bundle create example:digits_cnn --cases 3 -o digits.hilb")
@click.argument("model", type=MODEL)
@board_options
@run_options("runtime", "device")
@click.option(
    "--function",
    "functions",
    multiple=True,
    metavar="NAME",
    help="Include only this entry point (default: all). Repeatable.",
)
@run_options("dims", "compile_flags")
@cache_options
@click.option(
    "--case",
    "files",
    multiple=True,
    metavar="[METHOD=]PATH",
    help="Case: an .npz, or a directory of input_0.npy, output_0.npy, ... (or .pb). Repeatable.",
)
@run_option("inputs")
@run_option("expected", help="Expected output of --input.")
@run_option(
    "generate", type=FILE, help="TOML file with prompts for a decoder. Adds a case for each call to the other cases."
)
@click.option("--cases", "random", type=click.IntRange(min=0), metavar="N", help="Number of random cases per method.")
@run_options("seed", "input_range")
@run_option("references", help="Reference that computes the expected outputs (default: by format).")
@run_option("rtol", help="Relative tolerance of every case (default: by dtype).")
@run_option("atol", help="Absolute tolerance of every case (default: by dtype).")
@run_option("accept", help="Criteria for all cases instead of a tolerance. Repeatable.")
@run_option("arithmetic")
@run_option("timeout")
@wait_option
@verbose_option
@_sign
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Bundle file to write (default: MODEL.hilb).")
@json_option
def create(model: Path, output: Path | None, signing_key: Path | None, as_json: bool, **settings: Any) -> int:
    """Compile MODEL for a board and bundle it with test cases.

    Checks that the cases match the model's signature. A CPU reference computes missing outputs; the bundle contains the
    name of the reference. Without --case, --input, --generate or --cases, creates one random case.
    """
    from hil.controller.pipeline.boards.board_pool import BoardPool
    from hil.controller.storage.run_context import open_context
    from hil.controller.workloads.bundles.create import Request, create_bundle

    if len(settings["references"]) > 1:
        raise UsageError("a bundle supports only one --reference")
    target = _free(output or Path(f"{model.stem}.hilb"))
    choice = choose_board(settings)
    options = add_project_settings(run_settings(settings))
    request = Request(model, settings["functions"], options, settings["files"], settings["random"])
    with open_context() as context:
        with Screen(quiet=as_json) as screen:
            screen.begin(model.stem, 1)

            def note_target(board: Board) -> None:
                if board.target:
                    screen.note(f"compiling for {board.target}")

            progress = functools.partial(screen.stage, model.stem, 0)
            with BoardPool("hil bundle create", wait_s=settings["wait_s"], say=screen.note, opened=note_target) as pool:
                connect = functools.partial(pool.session, choice, runtimes=(options.runtime,))
                bundle = create_bundle(request, choice, context, connect=connect, say=progress)
        return _save(bundle, target, signing_key, as_json)


@bundle.command(epilog="Example: hil bundle extract digits.hilb program")
@_BUNDLE
@click.argument("folder", type=FILE)
@json_option
def extract(bundle: Path, folder: Path, as_json: bool) -> int:
    """Write the program of a BUNDLE, without its cases, to a directory."""
    from hil.controller.records.commands.bundles import ExtractedProgram
    from hil.controller.storage.runs import convert_write_errors
    from hil.controller.workloads.bundles.program_case import open_bundle

    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} already exists", hint="specify an empty or new directory")
    opened = open_bundle(bundle)
    with convert_write_errors(folder, ""):
        folder.mkdir(parents=True, exist_ok=True)
    program = opened.extract(folder)
    files = {name: path.stat().st_size for name, path in program.files.items()}
    document = ExtractedProgram(
        folder=str(folder),
        runtime=program.runtime,
        main=program.main,
        files=files,
        methods=list(program.methods),
        exit_code=0,
    )
    methods = f"{len(program.methods)} method{'s' * (len(program.methods) != 1)}: {', '.join(program.methods)}"
    return answer(as_json, document, f"{program.files[program.main]}: {sum(files.values()):,} bytes, {methods}")


@bundle.command(epilog="Example: hil bundle export digits.hilb --to flagfile digits_flagfiles")
@_BUNDLE
@click.argument("path", type=FILE)
@click.option(
    "--to",
    "form",
    required=True,
    metavar="FORMAT",
    help="Format: onnx, flagfile, golden, bpte.",
    shell_complete=_complete_format,
)
@json_option
def export(bundle: Path, path: Path, form: str, as_json: bool) -> int:
    """Export a BUNDLE to PATH in another tool's format."""
    from hil.controller.records.commands.bundles import ExportedBundle
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.runs import convert_write_errors
    from hil.controller.storage.sources.packages import pick
    from hil.controller.workloads.bundles.formats import load_formats, write_format
    from hil.controller.workloads.bundles.program_case import open_bundle
    from hil.controller.workloads.bundles.show import format_size

    is_folder = pick("bundle format", load_formats(), form).is_folder
    if path.exists() and not (is_folder and path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} already exists", hint="specify a new path")
    opened = open_bundle(bundle)
    with open_context() as context, convert_write_errors(path, ""):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_format(form, opened, path, context=context)
    count = sum(len(method.cases) for method in opened.methods)
    document = ExportedBundle(path=str(path), format=form, cases=count, exit_code=0)
    return answer(as_json, document, f"{path}: {form}, {format_size(opened)}")


@bundle.command("import", epilog="Example: hil bundle import model_dir --from onnx -o model.hilb")
@click.argument("path", type=FILE)
@click.option(
    "--from",
    "form",
    required=True,
    metavar="FORMAT",
    help="Format: onnx, flagfile, golden, bpte.",
    shell_complete=_complete_format,
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="Bundle file to write (default: PATH's name with the suffix .hilb).",
)
@_sign
@json_option
def import_from(path: Path, form: str, output: Path | None, signing_key: Path | None, as_json: bool) -> int:
    """Import another tool's files at PATH as a bundle. Program, inputs and expected outputs are not changed."""
    from hil.controller.storage.run_context import open_context
    from hil.controller.workloads.bundles.formats import read_format

    if not path_exists(path):
        raise UsageError(f"{path} not found", hint=suggest_path(path).rstrip())
    target = _free(output or Path(f"{path.absolute().stem}.hilb"))
    with open_context() as context:
        bundle = read_format(form, path, context=context)
        return _save(bundle, target, signing_key, as_json)


@bundle.command(epilog="Example: hil bundle inspect digits_cnn.hilb")
@_BUNDLE
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show the contents of a BUNDLE: program, methods, cases, sizes and signer."""
    from hil.controller.workloads.bundles.program_case import open_bundle
    from hil.controller.workloads.bundles.show import describe_bundle, print_bundle

    document = describe_bundle(open_bundle(bundle), bundle)
    answer(as_json, document, show=lambda: print_bundle(document))


@bundle.command(epilog="Example: hil bundle verify digits_cnn.hilb --key signing_key.pub")
@_BUNDLE
@_key
@json_option
def verify(bundle: Path, key: Path | None, as_json: bool) -> int:
    """Verify a BUNDLE: all digests, cases against method signatures, and the bundle's signature.

    Runs no program. Exits with 2 if the bundle is damaged.
    """
    from hil.bundles.signature import format_fingerprint
    from hil.controller.records.commands.bundles import VerifiedBundle
    from hil.controller.workloads.bundles.program_case import open_bundle
    from hil.controller.workloads.bundles.show import format_size

    opened = open_bundle(bundle, key)
    by = format_fingerprint(opened.head.public_key) if opened.head.signature else ""
    count = sum(len(method.cases) for method in opened.methods)
    document = VerifiedBundle(
        bundle=str(bundle),
        digest=opened.digest,
        signed_by=by,
        trusted=key is not None,
        methods=len(opened.methods),
        cases=count,
        exit_code=0,
    )
    signed = f"signed by {by}" if by else "not signed"
    if by and key is None:
        signed += " (untrusted key: specify trusted keys with --key)"
    return answer(as_json, document, f"{bundle}: sound, {format_size(opened)}, {signed}")


@bundle.command(epilog="Example: hil bundle run digits_cnn.hilb --board root@10.0.0.7")
@_BUNDLE
@target_options
@_method
@_case
@_key
@run_option("device")
@run_option("require_independent")
@tolerance_options
@arithmetic_option
@iteration_options
@limit_options
@label_option
@runs_option
@json_option
def run(
    bundle: Path, methods: tuple[str, ...], cases: tuple[str, ...], key: Path | None, as_json: bool, **settings: Any
) -> int:
    """Run the cases of a BUNDLE on a board in one session, and compare with the expected outputs.

    Results are stored continuously as with `hil run`. Multiple boards or hardware types are targets.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.workloads.bundles.run import run_bundle
    from hil.controller.workloads.bundles.show import print_run

    targets = split_targets(settings, "board", "hw_type")
    job = add_project_settings(Job(models=(bundle,), **settings))
    with Screen(quiet=as_json) as screen:
        if len(targets) > 1:
            from hil.controller.workloads.matrix.workloads import run_bundle_matrix

            made = run_bundle_matrix(job, targets, methods, key, cases=cases, screen=screen)
            add_to_history(made[0])
            return answer_matrix(as_json, *made)
        record = run_bundle(job, methods, key, cases=cases, screen=screen)
    add_to_history(record.folder or None)
    return answer(as_json, record, show=lambda: print_run(record))


@bundle.command(epilog="Example: hil bundle verifier --target aarch64-linux-musl -o verify")
@click.option("--target", default="", metavar="T", help="Zig target triple to build for (default: this machine).")
@click.option(
    "-o", "--output", type=FILE, default="verify", metavar="FILE", help="Program file to write (default: verify)."
)
@click.option(
    "--runtime",
    type=FILE,
    metavar="SOURCE",
    help="C or C++ source that calls a runtime library instead of a command.",
)
@click.option(
    "--link", "arguments", multiple=True, metavar="ARG", help="Compiler or linker argument: libruntime.a. Repeatable."
)
@json_option
def verifier(target: str, output: Path, runtime: Path | None, arguments: tuple[str, ...], as_json: bool) -> int:
    """Build the program that verifies bundles on a board without Python.

    On the board, `verify BUNDLE` runs and compares all cases of a .hilb or .bpte; see `verify --help`.
    """
    from hil.controller.records.commands.bundles import BuiltVerifier
    from hil.controller.workloads.bundles.verifier import COMMAND_RUNTIME, build_verifier

    target = build_verifier(_free(output), target, runtime=runtime or COMMAND_RUNTIME, arguments=arguments)
    size = output.stat().st_size
    document = BuiltVerifier(path=str(output), target=target, bytes=size, exit_code=0)
    return answer(as_json, document, f"{output}: {size:,} bytes, for {target}")


def _free(path: Path) -> Path:
    """Return the output path. Raises UsageError before the work begins if it is a directory."""
    if path.is_dir():
        raise UsageError(f"-o {path} is a directory", hint="specify a bundle file")
    return path


def _save(bundle: Bundle, path: Path, key: Path | None, as_json: bool) -> int:
    from hil.bundles import Bundle
    from hil.bundles.signature import format_fingerprint
    from hil.controller.storage.runs import convert_write_errors
    from hil.controller.workloads.bundles.methods import LEFT_OUT
    from hil.controller.workloads.bundles.show import describe_bundle, format_size

    with convert_write_errors(path.parent.absolute(), "-o"):
        path.parent.mkdir(parents=True, exist_ok=True)
    head = bundle.save(path, key=key)
    if as_json:
        return answer(True, describe_bundle(Bundle.open(path), path))
    signed = f", signed by {format_fingerprint(head.public_key)}" if head.signature else ""
    click.echo(f"{path}: {head.size:,} bytes, {format_size(bundle)}{signed}")
    for line in bundle.made.get(LEFT_OUT, ()):
        print_message(f"left out: {line}")
    return 0
