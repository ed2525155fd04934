"""`hil bundle`: a program and its test cases in one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.bundle_create import create, export, import_from
from hil.controller.cli.options import (
    board_options,
    fault_option,
    iteration_options,
    json_option,
    run_option,
    runs_option,
    tolerance_options,
    wait_option,
)

_BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
_method = click.option("--method", "methods", multiple=True, metavar="M", help="Only this entry point. Repeats.")
_key = click.option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="PUB",
    help="Refuse a bundle that none of the ed25519 keys in this file has signed.",
)


@click.group(epilog="Example: hil bundle create examples/digits/digits_cnn.onnx --cases 3")
def bundle() -> None:
    """Keep a program with its test cases in one .hilb file, and check boards against it."""


for _command in (create, export, import_from):
    bundle.add_command(_command)


@bundle.command(epilog="Example: hil bundle inspect digits_cnn.hilb")
@_BUNDLE
@json_option
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a BUNDLE holds: program, methods, cases, sizes, and who signed it."""
    from hil.controller.cli.screen import print_json
    from hil.controller.workloads.bundles.program_case import open_bundle
    from hil.controller.workloads.bundles.show import document_of, print_bundle

    document = document_of(open_bundle(bundle), bundle)
    if as_json:
        print_json(document)
    else:
        print_bundle(document)


@bundle.command(epilog="Example: hil bundle verify digits_cnn.hilb --key signing_key.pub")
@_BUNDLE
@_key
@json_option
def verify(bundle: Path, key: Path | None, as_json: bool) -> int:
    """Check a BUNDLE itself: every digest, the cases beside the methods' signatures, the signature.

    Nothing is run. A bundle that is not sound ends with exit code 2.
    """
    from hil.bundles.signature import fingerprint
    from hil.controller.cli.screen import print_json
    from hil.controller.workloads.bundles.program_case import open_bundle
    from hil.controller.workloads.bundles.show import counted

    opened = open_bundle(bundle, key)
    by = fingerprint(opened.head.public_key) if opened.head.signature else ""
    count = sum(len(method.cases) for method in opened.methods)
    if as_json:
        told = {"bundle": str(bundle), "digest": opened.digest, "signed_by": by, "trusted": key is not None}
        print_json({"schema": 1, **told, "methods": len(opened.methods), "cases": count, "exit_code": 0})
        return 0
    signed = f"signed by {by}" if by else "not signed"
    if by and key is None:
        signed += " (a key that nobody here vouches for: name those you trust with --key)"
    click.echo(f"{bundle}: sound, {counted(opened)}, {signed}")
    return 0


@bundle.command(epilog="Example: hil bundle run digits_cnn.hilb --board root@10.0.0.7")
@_BUNDLE
@board_options
@_method
@_key
@tolerance_options
@iteration_options
@run_option("timeout")
@run_option("no_fallback")
@wait_option
@fault_option
@runs_option
@json_option
def run(bundle: Path, methods: tuple[str, ...], key: Path | None, as_json: bool, **settings: Any) -> int:
    """Run every case of a BUNDLE on a board, in one session, and compare with what is expected.

    Everything is stored as it comes, as `hil run` does.
    """
    from hil.controller.cli.screen import Screen, print_json
    from hil.controller.pipeline.options import Job
    from hil.controller.workloads.bundles.run import run_bundle
    from hil.controller.workloads.bundles.show import print_run

    job = Job(models=(bundle,), **settings)
    with Screen(quiet=as_json or not sys.stderr.isatty()) as screen:
        record = run_bundle(job, methods, key, screen=screen)
    if as_json:
        print_json(record)
    else:
        print_run(record)
    return int(record["exit_code"])
