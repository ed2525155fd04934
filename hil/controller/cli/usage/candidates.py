"""Candidates of shell completion for the values of options and arguments.

A function of this module is the ``shell_complete`` of a click parameter. It imports modules on its first use, and reads
no records, so that completion is fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.core.examples import FILES, PREFIX, locate_example
from hil.errors import HilError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem[str]]"]
# File names may contain text that a shell would run.
_HARMLESS = re.compile(r"[\w@%+=:,./-]+")
_LATEST = "latest"


def make_completion(list_names: Callable[[click.Context], Iterable[str]], *, files: bool = False) -> Complete:
    """Return the completion for names.

    Args:
        list_names: Returns the names. An error means that there are no names.
        files: True to complete files if no name matches.
    """

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        try:
            names = list(dict.fromkeys(list_names(ctx)))
        except (HilError, OSError, ValueError):
            names = []
        found = [CompletionItem(one) for one in names if one.startswith(incomplete) and _HARMLESS.fullmatch(one)]
        return found if found or not files else [CompletionItem(incomplete, type="file")]

    return complete


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete a file, also after ``NAME=``."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


class ModelPath(click.Path):
    """Path of a model or of data, or an example of hil such as ``example:digits_cnn``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        return super().convert(locate_example(value) if isinstance(value, str) else value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        """Complete a file or an example."""
        return complete_models(ctx, param, incomplete)


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete a directory."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def _list_boards(_: click.Context) -> list[str]:
    from hil.controller.devices.ssh.aliases import list_aliases
    from hil.core.boards import list_boards

    aliases = list_aliases()
    return [*sorted(list_boards()), *aliases, *(f"ssh:{alias}" for alias in aliases)]


def _list_types(_: click.Context) -> list[str]:
    from hil.core.boards import list_boards

    return sorted(list_boards())


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete a file, or an example of hil after ``example:``."""
    if incomplete.startswith(PREFIX):
        return make_completion(lambda _: [f"{PREFIX}{name}" for name in FILES])(ctx, param, incomplete)
    return complete_file(ctx, param, incomplete)


def _list_own_boards(_: click.Context) -> list[str]:
    from hil.core.config_files import get_user_folder

    folder = get_user_folder()
    return sorted(path.stem for path in (folder / "boards").glob("*.toml")) if folder else []


def _list_addresses(_: click.Context) -> list[str]:
    from hil.controller.devices.ssh.aliases import list_aliases
    from hil.core.boards import list_boards

    return [*list_aliases(), *(name for name in sorted(list_boards()) if name.partition("-")[0] == "sim")]


def _list_runtimes(_: click.Context) -> list[str]:
    from hil.core.installed import list_entry_points
    from hil.core.runtimes import RUNTIMES

    return [*RUNTIMES, *(point.name for point in list_entry_points("hil.runtimes"))]


def _list_references(_: click.Context) -> list[str]:
    from hil.controller.backends.references.table import list_reference_names

    return list_reference_names()


def _list_flows(_: click.Context) -> list[str]:
    from hil.controller.models.flows.flow_registry import list_flow_names

    return list_flow_names()


def _read_faults() -> Mapping[str, Mapping[str, object]]:
    from hil.core.named import resolve

    # The simulator runs in another process, and the controller does not depend on it.
    faults: Mapping[str, Mapping[str, object]] = resolve("hil.sim.faults:FAULTS")
    return faults


def _list_arithmetics(_: click.Context) -> list[str]:
    from hil.core.arithmetic import ARITHMETICS

    return list(ARITHMETICS)


def _complete_fault(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a fault, or the name of its next key."""
    from click.shell_completion import CompletionItem

    name, colon, keys = incomplete.partition(":")
    if not colon:
        return make_completion(lambda _: _read_faults())(ctx, param, incomplete)
    *done, last = keys.split(",")
    start = f"{name}:" + "".join(f"{one}," for one in done)
    known = _read_faults().get(name, {})
    return [CompletionItem(f"{start}{key}=") for key in known if key.startswith(last)]


def _complete_criterion(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the measure of the last criterion: ``logits:top1>=0.99,k``."""
    from click.shell_completion import CompletionItem

    from hil.compare.measures import measure_names

    start = incomplete[: max(map(incomplete.rfind, ":, ")) + 1]
    last = incomplete[len(start) :]
    return [CompletionItem(f"{start}{name}") for name in measure_names() if name.startswith(last)]


def complete_stored(*records: str, root: str = "") -> Complete:
    """Return the completion for the IDs of stored results in ``--out``, the newest first.

    Args:
        records: Names of records. A directory with one of them is a result. Default: the records of runs.
        root: Directory without ``--out``. Default: the directory of runs, also from the project file.
    """

    def list_stored(ctx: click.Context) -> list[str]:
        from hil.controller.cli.commands import read_project_runs
        from hil.controller.storage.runs import RunStore
        from hil.controller.storage.session_folders import DEFAULT_ROOT

        folder = ctx.params.get("out") or root or read_project_runs() or DEFAULT_ROOT
        ids = RunStore(Path(folder)).list_ids(*records)
        return [*([_LATEST] if ids else []), *reversed(ids)]

    return make_completion(list_stored, files=True)


def choose_names(*names: str, files: bool = False) -> Complete:
    """Return the completion for a fixed list of names."""
    return make_completion(lambda _: names, files=files)


def complete_list(list_names: Callable[[], Iterable[str]]) -> Complete:
    """Return the completion for the last name of a list that is separated by commas."""
    complete = make_completion(lambda _: list_names())

    def complete_last(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        start = incomplete[: incomplete.rfind(",") + 1]
        found = complete(ctx, param, incomplete[len(start) :])
        return [CompletionItem(f"{start}{item.value}") for item in found]

    return complete_last


complete_boards = make_completion(_list_boards, files=True)
complete_own_boards = make_completion(_list_own_boards)
complete_addresses = make_completion(_list_addresses)
complete_types = make_completion(_list_types)
complete_runtimes = make_completion(_list_runtimes)
complete_references = make_completion(_list_references)
complete_runs = complete_stored()
complete_flows = make_completion(_list_flows, files=True)
complete_faults = _complete_fault
complete_criteria = _complete_criterion
# Fields of :class:`hil.controller.pipeline.settings.options.RunSettings` -> completion of their options.
OF_SETTINGS: dict[str, Complete] = {
    "runtime": complete_runtimes,
    "references": complete_references,
    "accept": complete_criteria,
    "arithmetic": make_completion(_list_arithmetics),
    "inputs": complete_file,
    "expected": complete_file,
}
