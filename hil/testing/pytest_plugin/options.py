"""The plugin's options and ini settings, and what they come to: what a suite run would be asked for."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hil.controller.pipeline.option_names import by_table, rename_options
from hil.controller.pipeline.options import (
    PROFILED_COUNTS,
    CaseSettings,
    Spec,
    flag_of,
    parse_dims,
    parse_seconds,
    specs_of,
)
from hil.controller.pipeline.project import load_project
from hil.core.text import visible
from hil.testing.traces.backends import PYTEST_DEST, TEXTS, backends_text, refuse_second, times_given

if TYPE_CHECKING:
    from hil.controller.workloads.suites.request import Request

MODELS = "hil_models"
FLOW = "hil_flow"
OUT = ".hil"
# Options whose values are targets.
_TARGETS = ("hil_flow", "hil_runtime_hw_type")
# What of pytest's own decides what is found where.
_PLACES = {"inifilename": "-c", "rootdir": "--rootdir", "override_ini": "-o"}


@dataclass(frozen=True)
class Option:
    """One option."""

    name: str
    help: str
    known: str = ""  # the name that hil's own commands give it; "" is none
    # metavar, type, default, choices: as argparse has them; a ``bool`` takes no value.
    metavar: str | None = None
    type: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] | None = None
    repeats: bool = False  # whether several may be given
    counts: bool = True  # whether what a case comes to depends on it, so that the command which repeats the case has it

    @property
    def dest(self) -> str:
        """Its name among pytest's options."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def settings(self) -> dict[str, Any]:
        """What argparse needs to know."""
        if self.type is bool:
            return {"dest": self.dest, "help": self.help, "action": "store_true"}
        names = ("dest", "help", "type", "default", "choices", "metavar")
        return {name: getattr(self, name) for name in names} | {"action": "append" if self.repeats else "store"}


# Of a case's settings: those that a project's own options hardly have, under hil's own names too.
_SHORT = ("recompute", "debug_ir", "debug_ir_passes", "no_fallback")


def _of_cases() -> Iterator[Option]:
    """The options of a case's settings."""
    usual = CaseSettings()
    for name, spec in specs_of(CaseSettings).items():
        flag, default = flag_of(name, spec), getattr(usual, name)
        is_float = default is None and spec.metavar != "DIR"
        profiled = f", with --hil-runtime-profile {PROFILED_COUNTS[name]}" if name in PROFILED_COUNTS else ""
        yield Option(
            f"--hil-{flag.removeprefix('--')}",
            spec.help + (f" (default {default:g}{profiled})" if spec.shows_default else ""),
            flag if name in _SHORT else "",
            None if isinstance(default, bool) else spec.metavar or "X",
            type=float if is_float else str if default is None or spec.repeats else type(default),
            default=None if spec.repeats or isinstance(default, bool) or name in PROFILED_COUNTS else default,
            repeats=spec.repeats,
            counts=spec.decides,
        )


OPTIONS = (
    *_of_cases(),
    Option(
        "--hil-board",
        "Board to run on: USER@HOST, a name, unix:PATH, farm:SELECTOR (a worker of xdist has one to itself), ...",
        "--board",
        "ADDR|NAME",
        repeats=True,
    ),
    Option("--hil-each-board", "Each board that is named is a target of its own, and has all cases.", type=bool),
    Option(
        "--hil-runtime-hw-type",
        "Kind of hardware (default sim); several are targets: each case is a test on each.",
        "--runtime-hw-type",
        "TYPE",
        repeats=True,
    ),
    Option(
        "--hil-flow",
        f"How models are compiled and run (default: ini {FLOW}, else iree); several are targets too.",
        metavar="NAME|FILE",
        repeats=True,
    ),
    Option("--hil-no-layers", "Whole models only.", type=bool),
    Option("--hil-group", "What a layer is (default node).", default="node", choices=("node", "fused")),
    Option(
        "--hil-layer-inputs",
        "What layers are run on: what the reference computed for the whole model (default), or random values.",
        default="real",
        choices=("real", "random"),
    ),
    Option(
        "--hil-merge",
        "Layers that are one case: of the same weights and inputs (content, the default), of one shape, or none.",
        default="content",
        choices=("content", "shape", "none"),
    ),
    Option(
        "--hil-dim", "Value of a symbolic dimension, of the models that have it.", metavar="NAME=SIZE", repeats=True
    ),
    Option(
        "--hil-wait",
        "How long to wait for a board that somebody else uses, in seconds (default 60).",
        metavar="S",
        type=float,
        default=60.0,
        counts=False,
    ),
    Option("--hil-identity", "Private key for SSH; write --hil-identity=FILE.", metavar="FILE"),
    Option(
        "--hil-known-hosts",
        "Pinned host keys (default: ~/.ssh/known_hosts); write --hil-known-hosts=FILE.",
        metavar="FILE",
    ),
    Option("--hil-accept-new-host-key", "Pin the key of a host that was never seen.", type=bool),
    Option("--hil-only-expected-failures", "Run only what expected.toml says will fail.", type=bool, counts=False),
    Option(
        "--hil-runtime-profile",
        "Also run each case under the runtime's profiler: a Perfetto trace and a table of operations in DIR/CASE.",
        metavar="DIR",
        counts=False,
    ),
    Option(
        "--hil-compile-profile",
        "Also compile each case with timing on: passes, dispatches and executables in DIR/CASE.",
        metavar="DIR",
        counts=False,
    ),
    Option(
        "--hil-out",
        "Write the reports of `hil suite run` (HTML, JUnit, CSV, ...) to DIR/MODELS/TYPE, a folder for each folder of "
        f"models and kind of hardware. Without it tensors and logs of failures alone are kept, in {OUT}.",
        metavar="DIR",
        counts=False,
    ),
)

# What hil's own commands call an option -> its name here.
_RENAMED = {
    **{f"--{option.name.removeprefix('--hil-')}": option.name for option in OPTIONS},
    "--profile": "--hil-runtime-profile",
    "--compile-time-profile": "--hil-compile-profile",
}


def renamed(text: str) -> str:
    """Return a message with hil's options as pytest has them: ``--hil-dim``."""
    return visible(rename_options(text, by_table(_RENAMED)))


# Folders of the profiles: the option -> the kind of profile.
PROFILES = {"runtime_profile": "run", "compile_profile": "compile"}
# What pytest raises, by its version, for an option that somebody else has.
CONFLICTS = (ValueError, argparse.ArgumentError)
# Of which options the short name is another plugin's here.
TAKEN = pytest.StashKey[list[str]]()


def add_options(parser: pytest.Parser, config: Any) -> None:
    """Add the ini settings and the options: the short names only where the settings say that hil is used here."""
    parser.addini(MODELS, "Folders with models to test on boards, relative to this file.", "paths", default=[])
    parser.addini(FLOW, "How they are compiled and run.", "string", default="iree")
    group = parser.getgroup("hil", "models on boards")
    taken = config.stash.setdefault(TAKEN, [])
    for option in OPTIONS:
        if option.known and config.getini(MODELS):
            try:
                group.addoption(option.name, option.known, **option.settings)
                continue
            except CONFLICTS:
                taken.append(option.known)
        group.addoption(option.name, **option.settings)
    config.pluginmanager.register(LateOptions(), "hil-late-options")


class LateOptions:
    """The options of traces, added after all others: a project that has one of these names for its own keeps it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self, parser: pytest.Parser) -> Iterator[None]:
        """Once the project's own options are there."""
        yield
        group = parser.getgroup("hil-traces", "modules on backends (hil.testing.TracedModuleTestCase)")
        for name, text in TEXTS.items():
            is_folder = name == "artifacts_dir"
            with contextlib.suppress(*CONFLICTS):
                group.addoption(
                    f"--{name}",
                    dest=PYTEST_DEST.format(name),
                    help=text,
                    metavar="DIR" if is_folder else "NAMES",
                    type=str if is_folder else backends_text,
                )


def settings_of(config: pytest.Config) -> dict[str, Any]:
    """What the options say of any case, and where they say nothing the project file.

    Raises:
        UsageError: --hil-timeout is nothing that anybody waits, or the project file is wrong or not trusted.
    """
    project = load_project(config.invocation_params.dir)
    defaults = project.defaults if project is not None else {}
    usual = {option.dest: option.default for option in OPTIONS}
    given: set[str] = set()

    def setting(name: str, spec: Spec) -> Any:
        option = flag_of(name, spec).removeprefix("--").replace("-", "_")
        value = config.getoption(f"hil_{option}")
        if value not in (None, False, usual[f"hil_{option}"]):
            given.add(name)
        elif name in defaults:
            value = defaults[name]
        if name in PROFILED_COUNTS and value is None:
            return PROFILED_COUNTS[name] if config.getoption("hil_runtime_profile") else getattr(CaseSettings(), name)
        if spec.repeats:
            return spec.of_text(tuple(value or ()), f"--hil-{option}") if spec.of_text else tuple(value or ())
        if spec.metavar == "DIR":
            return config.invocation_params.dir / value if value else None
        return spec.of_text(value, f"--hil-{option}") if spec.of_text else value

    found = {name: setting(name, spec) for name, spec in specs_of(CaseSettings).items()}
    models = project.models if project is not None else {}
    per_model = {
        pattern: {name: value for name, value in values.items() if name not in given}
        for pattern, values in models.items()
    }
    return {**found, "per_model": per_model}


def request_of(config: pytest.Config) -> Request:
    """What the options ask for; its ``source`` is the folder of each suite's own.

    Raises:
        UsageError: --hil-timeout or --hil-wait is nothing that anybody waits, --hil-dim is no size, two profiles are to
            go into one folder.
    """
    from hil.controller.workloads.suites.request import Request, Settings, make_profile_folders
    from hil.errors import UsageError

    def given(name: str) -> Any:
        return config.getoption(f"hil_{name}")

    if given("runtime_profile") and given("runtime_profile") == given("compile_profile"):
        raise UsageError("--hil-runtime-profile and --hil-compile-profile each need a folder of their own")
    make_profile_folders(profile_folders(config, ""))

    def path(name: str) -> Path | None:
        return config.invocation_params.dir / given(name) if given(name) else None

    settings = Settings(profile=bool(given("runtime_profile")), **settings_of(config))
    return Request(
        "",
        flows_of(config)[0],
        # One of pytest's `addopts` may be on the command line again.
        tuple(dict.fromkeys(given("board") or ())),
        "",
        {
            "identity": path("identity"),
            "known_hosts": path("known_hosts"),
            "accept_new_host_key": given("accept_new_host_key"),
        },
        layers=not given("no_layers"),
        group=given("group"),
        layer_inputs=given("layer_inputs"),
        merge=given("merge"),
        dims=parse_dims(tuple(given("dim") or ()), "--hil-dim"),
        only_expected_failures=given("only_expected_failures"),
        wait_s=parse_seconds(given("wait"), "--hil-wait"),
        settings=settings,
    )


def absolute(path: Path) -> Path:
    """A path as pytest has it: without ``..``, but with its links."""
    return Path(os.path.abspath(path))  # noqa: PTH100 (Path.resolve would follow them)


def out_folder(config: pytest.Config) -> Path:
    """Where what failures leave behind goes."""
    named = config.getoption("hil_out")
    return config.invocation_params.dir / named if named else config.rootpath / OUT


def profile_folders(config: pytest.Config, case: str) -> dict[str, Path]:
    """Where a case's profiles go, by kind; empty where none is asked for."""
    asked = {kind: config.getoption(f"hil_{option}") for option, kind in PROFILES.items()}
    return {kind: config.invocation_params.dir / folder / case for kind, folder in asked.items() if folder}


def writes_reports(config: pytest.Config) -> bool:
    """Whether reports are asked for, of tests that run."""
    return bool(config.getoption("hil_out")) and not config.option.collectonly


def repeat_command(config: pytest.Config, nodeid: str) -> list[str]:
    """The words of the command that runs a test again as it was run now, from the same folder."""
    file, separator, name = nodeid.partition("::")
    words = ["pytest", os.path.relpath(config.rootpath / file, config.invocation_params.dir) + separator + name]
    typed = [str(argument) for argument in config.invocation_params.args]
    for place, flag in _PLACES.items():
        value = getattr(config.option, place, None)
        for one in value if isinstance(value, list) else [value]:
            if one and any(argument.endswith(str(one)) for argument in typed):
                words += [flag, str(one)]
    if file.startswith("../") and config.inipath and "-c" not in words:
        # Whoever names a file elsewhere has pytest look for the ini file there.
        words += ["-c", os.path.relpath(config.inipath, config.invocation_params.dir)]
    for option in OPTIONS:
        value = config.getoption(option.dest)
        if option.counts and value is not False and value != option.default:
            flag = option.known if option.known and option.known not in config.stash[TAKEN] else option.name
            for one in value if isinstance(value, list) else [value]:
                # What stands alone pytest takes for a path of tests, before it knows our options.
                words.append(flag if value is True else f"{flag}={one}")
    return words


def check_repeats(config: pytest.Config) -> None:
    """Refuse a second value where an option has one.

    What is typed takes the place of what `addopts` say, as everywhere in pytest: an option that makes targets has the
    typed values alone.

    Raises:
        UsageError: an option that has one value is typed several times.
    """
    words = config.invocation_params.args
    for option in OPTIONS:
        has_known = option.known and config.getini(MODELS) and option.known not in config.stash[TAKEN]
        count = times_given(words, option.name, *([option.known] if has_known else []))
        if option.dest in _TARGETS and (values := config.getoption(option.dest)) and count:
            setattr(config.option, option.dest, values[-count:])
        elif count > 1 and not option.repeats and option.type is not bool:
            refuse_second(option.name, count)
    for name in TEXTS:
        if config.getoption(PYTEST_DEST.format(name), None) is not None:
            refuse_second(f"--{name}", times_given(words, f"--{name}"))


def flows_of(config: pytest.Config) -> list[str]:
    """The flows that are asked for."""
    return config.getoption("hil_flow") or [_flow_of_ini(config)]


def _flow_of_ini(config: pytest.Config) -> str:
    """The flow that the ini file names; a file's path (``FILE.toml``, ``FILE.toml:NAME``) is relative to it."""
    flow: str = config.getini(FLOW)
    is_file = flow.endswith(".toml") or ".toml:" in flow
    return str(config.inipath.parent / flow) if is_file and config.inipath else flow
