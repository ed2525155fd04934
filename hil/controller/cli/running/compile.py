"""`hil compile`: compile a model for a board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    FILE,
    MODEL,
    board_options,
    choose_board,
    compile_profile_option,
    json_option,
    model_options,
    run_settings,
    verbose_option,
)
from hil.controller.cli.screen import answer, print_message
from hil.controller.storage.paths import is_folder
from hil.core.files import copy_file
from hil.core.scratch import make_temporary_folder
from hil.errors import UsageError


@make_command(epilog="Example: hil compile model.onnx --runtime-hw-type sim -o model.vmfb")
@click.argument("model", type=MODEL)
@board_options
@model_options
@compile_profile_option
@verbose_option
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Program file to write.")
@json_option
def compile(model: Path, output: Path | None, as_json: bool, **settings: Any) -> int:
    """Compile MODEL for a board and write the program to a file."""
    from hil.controller.analysis.profile.collect import check_folder, write_profiles
    from hil.controller.backends.compilers.tensorflow.tfcompile import RUNTIME as XLA_AOT
    from hil.controller.devices.board_choice import knows_target, use_named_target
    from hil.controller.pipeline.boards.board_pool import BoardPool
    from hil.controller.pipeline.runner import Runner
    from hil.controller.pipeline.stages import check_options
    from hil.controller.records.commands.models import CompiledProgram
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.runs import convert_write_errors
    from hil.formats.firmware import DESCRIPTION, ELF, name_firmware
    from hil.formats.xla_program import VALUES, make_values_name

    profile = {"compile": settings["compile_time_profile"]} if settings["compile_time_profile"] else {}
    for kind, folder in profile.items():
        check_folder(folder, kind)
    choice = choose_board(settings)
    options = run_settings(settings)
    check_options(options, choice)
    if output is not None and is_folder(output):
        raise UsageError(f"-o {output} is a directory", hint="specify a program file")
    config = use_named_target(choice.config, options.runtime, options.compile_flags)
    if not knows_target(config, options.runtime):
        with BoardPool("hil compile", say=print_message) as pool:
            seen = pool.session(choice, runtimes=(options.runtime,)).board
            config = seen.config
            print_message(f"compiling for {seen.target or seen.name}")
    with make_temporary_folder("hil-") as folder, open_context(1) as context:
        (Path(folder) / "logs").mkdir()
        runner = Runner(context, lasting=False)
        case = runner.compile(runner.begin(model, options, Path(folder), want_inputs=False), config)
        if case.error is not None:
            raise case.error
        *_, profiles = write_profiles(case, profile, run_id=model.stem, context=context)
    artifact = case.artifact
    assert artifact is not None
    for note in (note for profile in profiles for note in profile.notes):
        print_message(f"note: {note}")
    target = output or Path(f"{model.stem}{Path(ELF if artifact.main == DESCRIPTION else artifact.main).suffix}")
    # Name all files after the program: other programs may be in the same directory.
    named = {artifact.main: target.name}
    if artifact.runtime == XLA_AOT:
        named |= dict.fromkeys((VALUES, make_values_name(artifact.main)), make_values_name(target.name))
    elif artifact.main == DESCRIPTION:
        named = name_firmware(target.name)
    with convert_write_errors(target.parent.absolute(), "-o"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if artifact.runtime == XLA_AOT:  # remove variables from an older program with this name
            (target.parent / make_values_name(target.name)).unlink(missing_ok=True)
        written = []
        for name, path in artifact.files.items():
            path_to = target.parent / named.get(name, name)
            if not (path_to.exists() and path_to.samefile(path)):
                copy_file(path, path_to)
            written.append(str(path_to))
    size = sum(path.stat().st_size for path in artifact.files.values())
    seconds = case.timings.compile_s
    assert seconds is not None
    document = CompiledProgram(
        files=written,
        bytes=size,
        compiler=artifact.compiler,
        flags=list(artifact.flags),
        cached=artifact.cached,
        seconds=seconds,
        profiles=list(profiles),
        exit_code=0,
    )
    how = "from the cache" if artifact.cached else f"in {seconds:.1f} s"
    own = target.stat().st_size
    others = f" ({size:,} bytes in {len(written)} files)" if size != own else ""
    return answer(as_json, document, f"{target}: {own:,} bytes{others}, {artifact.compiler}, {how}")
