"""Flows by name: hil's own, those of installed packages, those of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.read import check_flow, read_flows
from hil.controller.storage.packages import registered
from hil.core.config_files import check_trust
from hil.core.digest import digest_file
from hil.errors import UsageError, did_you_mean

BESIDE = "flows.toml"
_GROUP = "hil.flows"


def flows(beside: Path = Path()) -> dict[str, Flow]:
    """Every flow by name.

    First hil's own, then those of the entry points ``hil.flows`` (a :class:`Flow`, a list of them, or a function that
    returns either), which may take the name of hil's own; then those of ``flows.toml`` in a folder, which may not.

    Args:
        beside: the folder: the one that hil was started in, or that of the models.

    Raises:
        UsageError: an entry point gives no flow, or a file cannot be read.
    """
    found = read_flows(Path(__file__).with_name("built_in.toml"))
    added: dict[str, Any] = registered(_GROUP, {})
    for name, thing in added.items():
        found |= {flow.name: flow for flow in _of_entry_point(name, thing)}
    if (beside / BESIDE).is_file():
        found = read_flows(beside / BESIDE) | found
    return found


def load_flow(text: str, beside: Path = Path(), *, trusted: bool = False) -> Flow:
    """The flow that a text names: a name, ``FILE.toml`` that holds one flow, or ``FILE.toml:NAME``.

    Args:
        text: what was typed.
        beside: see :func:`flows`.
        trusted: whether that folder is; else a flow of its ``flows.toml`` that has compiler flags is refused until the
            user trusts it: a compiler writes files and runs programs where its flags say.

    Raises:
        UsageError: there is none, the file says what no flow can be, or the user has not trusted it.
    """
    known = flows(beside)
    if text in known:
        flow, path = known[text], beside / BESIDE
        if flow.compile_flags and not trusted and text not in flows(Path(os.devnull)):
            asks = [f"compile_flags of the flow {text}"]
            check_trust(path.absolute(), digest_file(path), asks, f"--flow {path}:{text}")
        return flow
    file, found, name = text.rpartition(".toml:")
    if found or text.endswith(".toml"):
        path = Path(f"{file}.toml") if found else Path(text)
        held = read_flows(path)
        if not found and len(held) == 1:
            return next(iter(held.values()))
        if found and name in held:
            return held[name]
        said = f"{path} holds no flow {name!r}" if found else f"{path} holds {len(held)} flows"
        raise UsageError(
            said, hint=f"{did_you_mean(name, held)}name one: {path}:{next(iter(held))}; it holds {', '.join(held)}"
        )
    raise UsageError(
        f"there is no flow {text!r}",
        hint=f"{did_you_mean(text, known)}one of {', '.join(known)}; or a file: my.toml, my.toml:NAME",
    )


def _of_entry_point(name: str, thing: Any) -> list[Flow]:
    where = f"the entry point {name!r} of {_GROUP}"
    if callable(thing):
        try:
            thing = thing()
        except Exception as error:
            raise UsageError(f"{where} fails: {error}", hint="repair or uninstall the package it comes from") from error
    listed = [thing] if isinstance(thing, Flow) else thing
    if not isinstance(listed, list | tuple) or not all(isinstance(one, Flow) for one in listed):
        raise UsageError(
            f"{where} gives no flow: {thing!r:.80}", hint="a hil.controller.models.flows.Flow, or a list of them"
        )
    for flow in listed:
        check_flow(flow, f"{where}, flow {flow.name!r}")
    return list(listed)
