"""What went on with a board while something ran there: from two of its descriptions, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Bits of a Raspberry Pi's get_throttled: those from 16 on say "since the boot", the lower ones "now".
_FIRMWARE_BITS = {
    0: "its voltage was too low",
    1: "its firmware held the clock down",
    2: "its firmware throttled it",
    3: "it came to its soft temperature limit",
}
_JUMP_S = 1.0
# Readings with one of these names are texts, all others that are compared are numbers.
_IN_WORDS = ("firmware throttling", " governor")


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What happened to a board meanwhile that makes a run's times, or the run itself, doubtful.

    Args:
        before, after: what Describe said, as :attr:`hil.controller.devices.board.Board.info` has it. What is absent in
            one of them says nothing.

    Returns:
        A sentence for each: it rebooted, throttled, was slowed, was set otherwise, its clock jumped.
    """
    boots = [info.get("machine", {}).get("boot_id", "") for info in (before, after)]
    if all(boots) and boots[0] != boots[1]:
        return ["the board rebooted"]
    return [*_jump(before, after), *_throttled(_readings(before), _readings(after))]


def _jump(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    names = ("wall_ns", "clock_ns")
    if all(name in info for info in (before, after) for name in names):
        wall, monotonic = (int(after[name]) - int(before[name]) for name in names)
        jump = (wall - monotonic) / 1e9
        if abs(jump) >= _JUMP_S:
            yield f"the board's wall clock was set {abs(jump):.0f} s {'forward' if jump > 0 else 'back'}"


def _throttled(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in (name for name in before if name in after):
        was, now = before[name], after[name]
        if isinstance(was, str) != isinstance(now, str) or isinstance(was, str) != name.endswith(_IN_WORDS):
            continue
        if name == "throttle events" and now > was:
            yield f"the board throttled: its CPU counted {now - was:.0f} throttle events"
        elif name == "firmware throttling":
            yield from _firmware(was, now)
        elif name.startswith("cooling_device") and max(was, now) > 0:
            yield f"the board throttled: its CPU was slowed to cool it ({name} at step {max(was, now):.0f})"
        elif name.endswith(" highest frequency") and now < was:
            yield f"the board throttled: the {name} fell from {was:.0f} to {now:.0f} MHz"
        elif name.endswith(" governor") and now != was:
            yield f"the {name} was changed from {was} to {now}"


def _firmware(was: str, now: str) -> Iterator[str]:
    old, new = firmware_bits(was), firmware_bits(now)
    if old is None or new is None:
        return
    for bit, meaning in _FIRMWARE_BITS.items():
        if (old | new) >> bit & 1 or (new & ~old) >> (bit + 16) & 1:
            yield f"the board throttled: {meaning}"


def firmware_bits(text: str) -> int | None:
    """What a Raspberry Pi's firmware says of throttling; None where it says nothing."""
    try:
        return int(text, 16)
    except ValueError:
        return None


def _readings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> text or number; MessageToDict leaves out a number that is 0."""
    return {one["name"]: one.get("text") or float(one.get("value", 0.0)) for one in info.get("readings", ())}
