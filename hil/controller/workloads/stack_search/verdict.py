"""Conclude from the boards' answers which version of a part changes the answer: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hil.controller.records.decisions.stack_search import StackConclusion, StackVersion, TriedBoard
from hil.controller.records.stack import map_versions
from hil.errors import EXIT_BOARD, EXIT_FAIL, EXIT_NOTHING_RAN, EXIT_OK

# Values of --over that are not parts of the stack.
BOARD = "board"
_PROGRAM = "program"
_SHOWN = 60


@dataclass(frozen=True)
class StackVerdict:
    """Conclusion of a search.

    Attributes:
        found: versions that change the answer.
        confounders: other parts that separate the boards in the same way.
    """

    conclusion: StackConclusion
    text: str
    hint: str = ""
    found: tuple[str, ...] = ()
    confounders: tuple[str, ...] = ()
    exit_code: int = EXIT_FAIL


def group_by_version(boards: Sequence[TriedBoard], over: str) -> list[StackVersion]:
    """Return the boards by version of a part, in the order of the boards."""
    groups: dict[str, StackVersion] = {}
    for one in boards:
        version = get_version(one, over)
        empty = StackVersion(version=version, passing=[], failing=[], excluded=[])
        group = groups.setdefault(version, empty)
        place = {"pass": group.passing, "fail": group.failing}.get(one.answer, group.excluded)
        place.append(one.name or one.request)
    return list(groups.values())


def get_version(board: TriedBoard, over: str) -> str:
    """Return the version of a part on a board; "" if unknown."""
    return board.name if over == BOARD else map_versions(board.stack).get(over, "")


def conclude(boards: Sequence[TriedBoard], over: str) -> StackVerdict:
    """Return the verdict on a part."""
    good = [one for one in boards if one.answer == "pass" and get_version(one, over)]
    bad = [one for one in boards if one.answer == "fail" and get_version(one, over)]
    if not bad and (not good or any(one.answer == "fail" for one in boards)):
        return _conclude_without_versions(boards, over)
    versions = {get_version(one, over) for one in (*good, *bad)}
    if not bad:
        text = f"no {over} changes the answer: {_describe_versions(versions, over)} pass"
        found = StackVerdict("all pass", text, exit_code=EXIT_OK)
        return found if len(versions) > 1 else _conclude_single_version(boards, over, versions)
    if not good:
        text = f"the {over} is not the cause: the program fails with {_describe_versions(versions, over)}"
        found = StackVerdict("all fail", text)
        return found if len(versions) > 1 else _conclude_single_version(boards, over, versions)
    wrong, right = ({get_version(one, over) for one in group} for group in (bad, good))
    others = _list_separating_parts(good, bad, over)
    next_search = f"search over {others[0]}: --over {_quote(others[0])}" if others else ""
    if both := wrong & right:
        named = f": the boards differ in {_describe_parts(others, good, bad)}" if others else ""
        text = f"the {over} is not the cause: with {_describe_versions(both, over)}, boards pass and fail{named}"
        hint = next_search or "search for the board: --over board"
        return StackVerdict("not the part", text, hint, confounders=tuple(others))
    if over == BOARD:
        differences = f"; differences: {_describe_parts(others, good, bad)}" if others else ""
        text = f"wrong on {_list_boards(bad)}, correct on {_list_boards(good)}{differences}"
        return StackVerdict("found", text, next_search, _sort(wrong), tuple(others))
    text = (
        f"{over} {_join(wrong)} changes the answer: wrong on {_list_boards(bad)}, "
        f"correct with {_join(right)} on {_list_boards(good)}"
    )
    if others:
        text += f"; confounded with {_describe_parts(others, good, bad)}"
        same = f"{over} {_join(right)} and the {others[0]} of {_list_boards(bad[:1])}"
        return StackVerdict("confounded", text, f"run on a board with {same}", _sort(wrong), tuple(others))
    return StackVerdict("found", text, found=_sort(wrong))


def _conclude_without_versions(boards: Sequence[TriedBoard], over: str) -> StackVerdict:
    """Return the verdict if the answers have no versions, or there are no answers."""
    unknown = [one for one in boards if one.answer in ("pass", "fail") and not get_version(one, over)]
    if unknown:
        text = f"the {over} of {_list_boards(unknown)} is unknown"
        return _explain_incomparable(
            boards, text, f"supply it in the boards' configs: [stack] {_quote_key(over)} = ..."
        )
    text = "no board gives a clear answer"
    code = EXIT_BOARD if any(one.answer == "board error" for one in boards) else EXIT_NOTHING_RAN
    return StackVerdict("not comparable", text, exit_code=code)


def _conclude_single_version(boards: Sequence[TriedBoard], over: str, versions: set[str]) -> StackVerdict:
    text = f"all judged boards have the same {over}: {_join(versions)}"
    return _explain_incomparable(boards, text, f"add a board with another {over}")


def _explain_incomparable(boards: Sequence[TriedBoard], text: str, hint: str) -> StackVerdict:
    """Return the verdict for boards whose versions cannot be compared. Answers decide the exit code first."""
    answers = {one.answer for one in boards}
    if answers == {"pass"}:
        return StackVerdict("all pass", f"all boards pass, but {text}", hint, exit_code=EXIT_OK)
    code = EXIT_FAIL if "fail" in answers else EXIT_NOTHING_RAN
    return StackVerdict("not comparable", text, hint, exit_code=code)


def _list_separating_parts(good: Sequence[TriedBoard], bad: Sequence[TriedBoard], over: str) -> list[str]:
    """Return the other parts whose known versions on failing and passing boards have none in common.

    An unknown version may be any version, so it does not separate boards.
    """
    found = []
    for name in dict.fromkeys(name for one in (*good, *bad) for name in _map_parts(one)):
        wrong, right = ({_map_parts(one).get(name, "") for one in group} for group in (bad, good))
        if name != over and "" not in wrong | right and not wrong & right:
            found.append(name)
    return found


def _map_parts(board: TriedBoard) -> Mapping[str, str]:
    """Return all parts with the program, because boards with different CPUs may need different programs."""
    return {**map_versions(board.stack), _PROGRAM: board.program}


def _describe_parts(names: Sequence[str], good: Sequence[TriedBoard], bad: Sequence[TriedBoard]) -> str:
    texts = []
    for name in names:
        wrong, right = ({_map_parts(one)[name] for one in group} for group in (bad, good))
        texts.append(f"{name} ({_join(wrong)} fails, {_join(right)} passes)")
    return ", ".join(texts)


def _describe_versions(versions: set[str], over: str) -> str:
    return f"{over} {_join(versions)}" if len(versions) == 1 else f"{over}s {_join(versions)}"


def _list_boards(boards: Sequence[TriedBoard]) -> str:
    return ", ".join(one.name or one.request for one in boards)


def _sort(versions: set[str]) -> tuple[str, ...]:
    return tuple(sorted(versions))


def _join(versions: set[str]) -> str:
    return ", ".join(one if len(one) <= _SHOWN else f"{one[:_SHOWN]}..." for one in sorted(versions))


def _quote(name: str) -> str:
    return f"'{name}'" if " " in name else name


def _quote_key(name: str) -> str:
    return f'"{name}"' if " " in name else name
