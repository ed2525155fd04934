"""Options and ini settings of the plugin, and their conversion to a suite request."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hil.controller.pipeline.settings.command_keys import get_flow_file
from hil.controller.pipeline.settings.option_names import make_renamer, rename_options
from hil.controller.pipeline.settings.options import (
    PROFILED_COUNTS,
    CaseSettings,
    Spec,
    flag_of,
    list_specs,
    parse_dims,
    parse_seconds,
)
from hil.controller.pipeline.settings.project import load_project
from hil.core.text import escape_controls
from hil.testing.traces.backends import PYTEST_DEST, TEXTS, check_backends, count_option, refuse_second

if TYPE_CHECKING:
    from hil.controller.workloads.suites.request import SuiteRequest

MODELS = "hil_models"
FLOW = "hil_flow"
_DEFAULT_FLOW = "iree"
OUT = ".hil"
# Options that define targets.
_TARGETS = ("hil_flow", "hil_runtime", "hil_runtime_hw_type")
# Options of pytest that determine which tests and settings pytest finds.
_PLACES = {"inifilename": "-c", "rootdir": "--rootdir", "override_ini": "-o"}


@dataclass(frozen=True)
class Option:
    """Option of the plugin."""

    name: str
    help: str
    known: str = ""  # name in hil's commands; "" if none
    # metavar, type, default, choices: as in argparse; a ``bool`` is a flag without value.
    metavar: str | None = None
    type: Callable[[str], Any] = str
    default: Any = None
    choices: tuple[str, ...] | None = None
    repeats: bool = False  # True if the option may be repeated
    # True if the option can change a case's result; the command that repeats the case then includes the option.
    counts: bool = True

    @property
    def dest(self) -> str:
        """Name in pytest's options."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for argparse."""
        if self.type is bool:
            return {"dest": self.dest, "help": self.help, "action": "store_true", "default": self.default}
        names = ("dest", "help", "type", "default", "choices", "metavar")
        return {name: getattr(self, name) for name in names} | {"action": "append" if self.repeats else "store"}


def _to_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


# The dashes of an option in a help text.
_OPTION = re.compile(r"(?<![\w-])--(?=[a-z])")
# Case settings that also have the short names of hil's commands, because projects rarely define options with these
# names.
_SHORT = ("recompute", "debug_ir", "debug_ir_passes", "no_fallback")


def _iter_case_options() -> Iterator[Option]:
    """Yield the options for case settings. Their value is None unless given, because the project file has defaults."""
    usual = CaseSettings()
    for name, spec in list_specs(CaseSettings).items():
        flag, default = flag_of(name, spec), getattr(usual, name)
        is_float = default is None and spec.metavar != "DIR" and spec.of_text is None
        profiled = f", with --hil-profile {PROFILED_COUNTS[name]}" if name in PROFILED_COUNTS else ""
        yield Option(
            f"--hil-{flag.removeprefix('--')}",
            _OPTION.sub("--hil-", spec.help) + (f" (default {default:g}{profiled})" if spec.shows_default else ""),
            flag if name in _SHORT else "",
            None if isinstance(default, bool) else spec.metavar or "X",
            type=float if is_float else str if default is None or spec.repeats else type(default),
            repeats=spec.repeats,
            counts=spec.decides,
        )


OPTIONS = (
    *_iter_case_options(),
    Option(
        "--hil-board",
        "Board to run on: USER@HOST, a name, unix:PATH, farm:SELECTOR (leases one board per xdist worker), ...",
        "--board",
        "ADDR|NAME",
        repeats=True,
    ),
    Option("--hil-each-board", "Make each board a target that runs all cases.", type=bool),
    Option(
        "--hil-runtime-hw-type",
        "Hardware type (default sim). Repeatable: each type is a target, with a test per case.",
        "--runtime-hw-type",
        "TYPE",
        repeats=True,
    ),
    Option(
        "--hil-flow",
        f"Flow to compile and run models (default: ini {FLOW}, hil.toml, or {_DEFAULT_FLOW}). "
        "Repeatable: each flow is a target.",
        metavar="NAME|FILE",
        repeats=True,
    ),
    Option(
        "--hil-runtime",
        "Runtime (default: the flow's). Repeatable: each runtime is a target.",
        metavar="NAME",
        repeats=True,
    ),
    Option("--hil-no-layers", "Test whole models only, without layers.", type=bool),
    Option("--hil-group", "Definition of a layer (default node).", default="node", choices=("node", "fused")),
    Option(
        "--hil-layer-inputs",
        "Layer inputs: the reference's values from the whole model (default), or random values.",
        default="real",
        choices=("real", "random"),
    ),
    Option(
        "--hil-merge",
        "Layers to merge into one case: equal weights and inputs (content, the default), equal shapes, or none.",
        default="content",
        choices=("content", "shape", "none"),
    ),
    Option("--hil-dim", "Size of a symbolic dimension, for models that have it.", metavar="NAME=SIZE", repeats=True),
    Option(
        "--hil-wait",
        "Seconds to wait for a busy board (default 60).",
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
    Option("--hil-accept-new-host-key", "Pin the host key of an unknown host.", type=bool),
    Option("--hil-only-expected-failures", "Run only the expected failures in expected.toml.", type=bool, counts=False),
    Option(
        "--hil-known",
        "Do not fail for known failures: a triage file (hil triage), or the URL of hil web.",
        metavar="FILE|URL",
        counts=False,
    ),
    Option(
        "--hil-confirm",
        "Rerun mismatches N times, on the same and a different board, to detect flaky cases and bad boards.",
        metavar="N",
        type=_to_count,
        default=0,
        counts=False,
    ),
    Option("--hil-keep-all", "Also store the tensors of passed cases.", type=bool, counts=False),
    Option(
        "--hil-fault",
        "Simulator fault: crash, hang, corrupt, drop, slow, ... (docs/simulator.md). Repeatable.",
        metavar="FAULT",
        repeats=True,
    ),
    Option("--hil-sandbox", "Require the simulator's sandbox (default: if the kernel supports it).", type=bool),
    Option("--hil-no-sandbox", "Run the simulator's programs without a sandbox.", type=bool),
    Option(
        "--hil-fresh",
        "Start new simulators, and stop them at the end (default: reuse them).",
        type=bool,
        counts=False,
    ),
    Option(
        "--hil-profile",
        "Also profile each case with the runtime's profiler: Perfetto trace and table of operations in DIR/CASE.",
        metavar="DIR",
        counts=False,
    ),
    Option(
        "--hil-compile-time-profile",
        "Also profile the compilation of each case: passes, dispatches and executables in DIR/CASE.",
        metavar="DIR",
        counts=False,
    ),
    Option(
        "--hil-out",
        "Write the reports of `hil suite run` (HTML, JUnit, CSV, ...) to DIR/MODELS/TYPE, for each directory of models "
        f"and hardware type (default: only tensors and logs of failures, in {OUT}).",
        metavar="DIR",
        counts=False,
    ),
)

# Name in hil's commands -> name in pytest.
_RENAMED = {f"--{option.name.removeprefix('--hil-')}": option.name for option in OPTIONS}


def rename_for_pytest(text: str) -> str:
    """Return a message with pytest's names of hil's options: ``--hil-dim``."""
    return escape_controls(rename_options(text, make_renamer(_RENAMED)))


# Option for a profile directory -> kind of profile.
PROFILES = {"profile": "run", "compile_time_profile": "compile"}
# Errors that pytest raises for a conflicting option, depending on its version.
CONFLICTS = (ValueError, argparse.ArgumentError)
# Options whose short name is already used by another plugin.
TAKEN = pytest.StashKey[list[str]]()


def add_options(parser: pytest.Parser, config: Any) -> None:
    """Add the ini settings and options. Short names are added only if ``hil_models`` is set."""
    parser.addini(MODELS, "Directories of models to test on boards, relative to this file.", "paths", default=[])
    parser.addini(FLOW, f"Flow to compile and run the models (default: from hil.toml, or {_DEFAULT_FLOW}).", "string")
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
    """Plugin that adds the options of traces last, so that a project's options with the same names take precedence."""

    @pytest.hookimpl(wrapper=True)
    def pytest_load_initial_conftests(self, parser: pytest.Parser) -> Iterator[None]:
        """Add the options after the project's options."""
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
                    type=str if is_folder else check_backends,
                )


def read_settings(config: pytest.Config) -> dict[str, Any]:
    """Return the case settings of the options, with defaults from the project file.

    Raises:
        UsageError: invalid --hil-timeout, or the project file is invalid or not trusted.
    """
    project = load_project(config.invocation_params.dir)
    defaults = project.defaults if project is not None else {}
    usual = CaseSettings()
    given: set[str] = set()

    def read_setting(name: str, spec: Spec) -> Any:
        option = f"--hil-{flag_of(name, spec).removeprefix('--')}"
        value = config.getoption(option.removeprefix("--").replace("-", "_"))
        if value is not None:
            given.add(name)
        elif name in defaults:
            value = defaults[name]
        elif name in PROFILED_COUNTS and config.getoption("hil_profile"):
            return PROFILED_COUNTS[name]
        else:
            return getattr(usual, name)
        if spec.repeats:
            return spec.of_text(tuple(value), option) if spec.of_text else tuple(value)
        if spec.metavar == "DIR":
            return config.invocation_params.dir / value
        return spec.of_text(value, option) if spec.of_text else value

    found = {name: read_setting(name, spec) for name, spec in list_specs(CaseSettings).items()}
    if config.getoption("hil_runtime") or config.getoption("hil_flow") or config.getini(FLOW):
        given.add("runtime")
    models = project.models if project is not None else {}
    per_model = {
        pattern: {name: value for name, value in values.items() if name not in given}
        for pattern, values in models.items()
    }
    return {**found, "per_model": per_model}


def request_of(config: pytest.Config) -> SuiteRequest:
    """Return the suite request for the options. ``source`` is set later for every model directory.

    Raises:
        UsageError: invalid --hil-timeout, --hil-wait or --hil-dim, or both profiles have the same directory.
    """
    from hil.controller.workloads.suites.request import Settings, SuiteRequest, make_profile_folders
    from hil.errors import UsageError

    def get_option(name: str) -> Any:
        return config.getoption(f"hil_{name}")

    if get_option("profile") and get_option("profile") == get_option("compile_time_profile"):
        raise UsageError("--hil-profile and --hil-compile-time-profile require different directories")
    if get_option("sandbox") and get_option("no_sandbox"):
        raise UsageError("--hil-sandbox and --hil-no-sandbox are mutually exclusive")
    make_profile_folders(profile_folders(config, ""))

    def get_path(name: str) -> Path | None:
        return config.invocation_params.dir / get_option(name) if get_option(name) else None

    settings = Settings(profile=bool(get_option("profile")), **read_settings(config))
    return SuiteRequest(
        "",
        list_flows(config)[0],
        list_boards(config)[0],
        "",
        {
            "identity": get_path("identity"),
            "known_hosts": get_path("known_hosts"),
            "accept_new_host_key": get_option("accept_new_host_key"),
        },
        layers=not get_option("no_layers"),
        group=get_option("group"),
        layer_inputs=get_option("layer_inputs"),
        merge=get_option("merge"),
        dims=parse_dims(tuple(get_option("dim") or ()), "--hil-dim"),
        is_default_flow=not (get_option("flow") or _read_ini_flow(config)),
        only_expected_failures=get_option("only_expected_failures"),
        confirm=get_option("confirm"),
        keep_all=get_option("keep_all"),
        faults=tuple(get_option("fault") or ()),
        wait_s=parse_seconds(get_option("wait"), "--hil-wait"),
        settings=settings,
    )


def make_simulator_settings(config: pytest.Config) -> dict[str, str]:
    """Return the environment variables for the simulators of this process."""
    chosen = {"sandbox": ("HIL_SANDBOX", "required"), "no_sandbox": ("HIL_SANDBOX", "off")}
    chosen |= {"fresh": ("HIL_SIMULATOR", "fresh")}
    return {name: value for option, (name, value) in chosen.items() if config.getoption(f"hil_{option}")}


def make_absolute(path: Path) -> Path:
    """Return an absolute path in pytest's form: without ``..``, but with symlinks."""
    return Path(os.path.abspath(path))  # noqa: PTH100 (Path.resolve would follow them)


def choose_out_folder(config: pytest.Config) -> Path:
    """Return the directory for files of failed tests."""
    named = config.getoption("hil_out")
    return config.invocation_params.dir / named if named else config.rootpath / OUT


def profile_folders(config: pytest.Config, case: str) -> dict[str, Path]:
    """Return the directories of a case's profiles by kind; empty if no profile was requested."""
    asked = {kind: config.getoption(f"hil_{option}") for option, kind in PROFILES.items()}
    return {kind: config.invocation_params.dir / folder / case for kind, folder in asked.items() if folder}


def must_write_reports(config: pytest.Config) -> bool:
    """Return True if tests run and reports were requested."""
    return bool(config.getoption("hil_out")) and not config.option.collectonly


def repeat_command(config: pytest.Config, nodeid: str) -> list[str]:
    """Return the arguments of the command that repeats a test with the same options, from the same directory."""
    file, separator, name = nodeid.partition("::")
    words = ["pytest", os.path.relpath(config.rootpath / file, config.invocation_params.dir) + separator + name]
    typed = [str(argument) for argument in config.invocation_params.args]
    for place, flag in _PLACES.items():
        value = getattr(config.option, place, None)
        for one in value if isinstance(value, list) else [value]:
            if one and any(argument.endswith(str(one)) for argument in typed):
                words += [flag, str(one)]
    if file.startswith("../") and config.inipath and "-c" not in words:
        # pytest would search for the ini file in the test file's directory.
        words += ["-c", os.path.relpath(config.inipath, config.invocation_params.dir)]
    for option in OPTIONS:
        value = config.getoption(option.dest)
        if option.counts and value is not None and value is not False and value != option.default:
            flag = option.known if option.known and option.known not in config.stash[TAKEN] else option.name
            for one in value if isinstance(value, list) else [value]:
                # pytest would treat a separate value as a test path before it knows hil's options.
                words.append(flag if value is True else f"{flag}={one}")
    return words


def check_repeats(config: pytest.Config) -> None:
    """Raise an error if an option with a single value is repeated.

    As usual in pytest, the command line overrides `addopts`. For options that define targets, only values from the
    command line count.

    Raises:
        UsageError: a single-value option is repeated on the command line.
    """
    words = config.invocation_params.args
    for option in OPTIONS:
        has_known = option.known and config.getini(MODELS) and option.known not in config.stash[TAKEN]
        count = count_option(words, option.name, *([option.known] if has_known else []))
        if option.dest in _TARGETS and (values := config.getoption(option.dest)) and count:
            setattr(config.option, option.dest, values[-count:])
        elif count > 1 and not option.repeats and option.type is not bool:
            refuse_second(option.name, count)
    for name in TEXTS:
        if config.getoption(PYTEST_DEST.format(name), None) is not None:
            refuse_second(f"--{name}", count_option(words, f"--{name}"))


def list_flows(config: pytest.Config) -> list[str]:
    """Return the requested flows."""
    return config.getoption("hil_flow") or [_read_ini_flow(config) or _DEFAULT_FLOW]


def _read_ini_flow(config: pytest.Config) -> str:
    """Return the flow in the ini file, or else in the project file; "" if neither sets a flow.

    A path (``FILE.toml``, ``FILE.toml:NAME``) is relative to its file.
    """
    flow: str = config.getini(FLOW)
    if not flow:
        project = load_project(config.invocation_params.dir)
        return project.use("flow") if project else ""
    return str(config.inipath.parent / flow) if get_flow_file(flow) and config.inipath else flow


def list_boards(config: pytest.Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the requested boards and hardware types.

    Without options and without HIL_BOARD, the project file selects them.

    Raises:
        UsageError: the project file's board is unknown or not trusted.
    """
    from hil.controller.devices.choosing.board_resolver import get_named_board

    # The command line may repeat a board from pytest's `addopts`.
    boards = tuple(dict.fromkeys(config.getoption("hil_board") or ()))
    hw_types = tuple(config.getoption("hil_runtime_hw_type") or ())
    if boards or hw_types or get_named_board(""):
        return boards, hw_types
    project = load_project(config.invocation_params.dir)
    board, hw_type = project.use_board() if project else ("", "")
    return (board,) if board else (), (hw_type,) if hw_type else ()
