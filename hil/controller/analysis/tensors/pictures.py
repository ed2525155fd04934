"""Maps as PNG, without image libraries: a byte per cell, and a palette for colour-blind readers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.tensors.elements import (
    FINITE,
    INF_HERE,
    INF_THERE,
    MINUS_INF_HERE,
    NAN_HERE,
    NAN_THERE,
    SAME,
    Codes,
)
from hil.controller.analysis.tensors.maps import Map
from hil.controller.analysis.tensors.scales import EQUAL, STEPS, PaletteScale

# Every 16th colour from matplotlib's viridis and inferno (CC0), interpolated linearly. Their lightness increases
# uniformly.
_SCALES = {
    "viridis": "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73 5ec962 84d44b "
    "addc30 d8e219 fde725",
    "inferno": "000004 0b0724 210c4a 3d0965 57106e 71196e 8a226a a32c61 bc3754 d24644 e45a31 f1731d f98e09 fcac11 "
    "f9cb35 f2ea69 fcffa4",
}
# Colours of errors divided by the tolerance: within the tolerance, from far to near, and out of tolerance, likewise.
LIMIT_COLOURS = (("d0e4f2", "78a2c6", "1f5f99"), ("ffd27a", "f07818", "7a0c0c"))
EMPTY = 255
_CODES = STEPS + 1  # offset for codes from elements.NONFINITE
# Marker colours, which differ from each other and from the scales, also for colour-blind readers. Three colours are
# from Okabe and Ito's palette. The palette's orange and vermilion are not used, because inferno contains them.
COLOURS: Mapping[int, str] = MappingProxyType(
    {
        SAME: "8c8c8c",
        INF_THERE: "009e73",
        NAN_THERE: "cc79a7",
        MINUS_INF_HERE: "4d4dff",
        INF_HERE: "ff4fd8",
        NAN_HERE: "00b4ff",
    }
)
EQUAL_COLOUR = "d9d9d9"
_DARK = 0.75


def paint(map: Map, scale: PaletteScale | None) -> Codes:
    """Return every cell's palette index: from its number, or from a NaN or infinity; see :func:`_choose_codes`."""
    found = np.full(map.numbers.shape, EQUAL, np.uint8) if scale is None else scale.quantize(map.numbers)
    codes = _choose_codes(map, SAME + 1)
    codes[(map.codes == SAME) & ~np.isfinite(map.numbers)] = SAME
    found[codes > 0] = _CODES + codes[codes > 0]
    found[~map.filled] = EMPTY
    return found


def paint_codes(map: Map) -> Codes:
    """Return every cell's palette index like :func:`paint`, but only for NaN and infinities."""
    codes = _choose_codes(map, SAME)
    found = np.where(codes == FINITE, EQUAL, _CODES + codes).astype(np.uint8)
    found[~map.filled] = EMPTY
    return found


def is_mixed(map: Map, least: int = SAME + 1) -> bool:
    """Return True if neighbouring cells contain multiple kinds of elements, so that their colours alternate."""
    kinds = map.kinds if least <= SAME else map.kinds & ~np.uint8(1 << SAME)
    several = kinds & (kinds - (kinds > 0)) > 0
    return bool((several[1:] & several[:-1]).any() or (several[:, 1:] & several[:, :-1]).any())


def _choose_codes(map: Map, least: int) -> Codes:
    """Return for every cell the code of the kind of elements to show. FINITE shows the number.

    A cell with multiple kinds of elements shows the kind with the fewest cells, so that every kind is visible. In
    adjacent mixed cells, the kinds alternate, so that an area with 50 % NaN does not look like an area with only NaN.

    Args:
        least: the smallest code to consider.
    """
    has = {code: (map.kinds >> code & 1).astype(np.bool_) for code in range(least, NAN_HERE + 1)}
    order = sorted((code for code in has if has[code].any()), key=lambda code: (np.count_nonzero(has[code]), -code))
    found, first, near = (np.zeros(map.kinds.shape, np.uint8) for _ in range(3))
    count = (map.kinds >> FINITE & 1).astype(np.int64)
    for code in order:
        count += has[code]
    rows, columns = map.kinds.shape
    turn = (np.arange(rows)[:, np.newaxis] + np.arange(columns)) % np.maximum(count, 1)
    seen = np.zeros(map.kinds.shape, np.int64)
    for code in order:
        found[has[code] & (seen == turn)] = code
        alone = has[code] & (seen == 0)
        first[alone] = code
        beside = np.zeros(map.kinds.shape, np.bool_)
        beside[1:] |= has[code][:-1]
        beside[:, 1:] |= has[code][:, :-1]
        near[alone] = beside[alone]
        seen += has[code]
    return np.where(near > 0, found, first)


def make_palette(scale: str) -> bytes:
    """Return 256 RGB colours, three bytes each: the scale (viridis, inferno or limit), and the marker colours."""
    colours = np.zeros((256, 3), np.uint8)
    if scale == "limit":
        half = STEPS // 2
        colours[:half], colours[half:STEPS] = (_interpolate(anchors, half) for anchors in LIMIT_COLOURS)
    else:
        colours[:STEPS] = _interpolate(_SCALES[scale].split(), STEPS)
    colours[EQUAL] = tuple(bytes.fromhex(EQUAL_COLOUR))
    for code, colour in COLOURS.items():
        colours[_CODES + code] = tuple(bytes.fromhex(colour))
    return colours.tobytes()


def _interpolate(anchors: Sequence[str], steps: int) -> npt.NDArray[np.uint8]:
    stops = np.array([tuple(bytes.fromhex(colour)) for colour in anchors], np.float64)
    places = np.linspace(0, len(stops) - 1, steps)
    lines = [np.interp(places, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    return np.round(np.stack(lines, axis=1)).astype(np.uint8)


def encode_png(cells: Codes, scale: str, texts: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Encode palette indices as PNG, a pixel per cell; EMPTY cells are transparent.

    Args:
        texts: keyword -> text, for the file's metadata. Empty texts are left out.
    """
    rows, columns = cells.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # a PNG line starts with the filter type: 0, none
    lines[:, 1:] = cells
    head = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    alpha = bytes([255] * EMPTY + [0])
    body = zlib.compress(lines.tobytes(), 3)
    # An international text chunk: keyword, no compression, no language, no translated keyword, text.
    notes = [
        (b"iTXt", key.encode() + bytes(5) + text.encode("utf-8", "replace")) for key, text in texts.items() if text
    ]
    chunks = (
        (b"IHDR", head),
        (b"PLTE", make_palette(scale)),
        (b"tRNS", alpha),
        *notes,
        (b"IDAT", body),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def draw_scatter_png(counts: npt.NDArray[np.int64]) -> bytes:
    """Draw logarithmic element counts per cell for a white background. The first row is at the bottom."""
    steps = PaletteScale(1.0, float(max(counts.max(initial=1), 10)), "log", marks_zero=True).quantize(
        counts.astype(np.float64)
    )
    # Skip the lightest colours, which are not visible on white.
    steps = (steps * np.float64(_DARK)).astype(np.uint8)
    steps[counts == 0] = EMPTY
    return encode_png(steps[::-1], "viridis")
