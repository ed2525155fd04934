from __future__ import annotations

import pytest

from hil.core.memory_faults import make_memory_error
from hil.errors import BoardUnfit, RunCrashed

GIB = 1 << 30


@pytest.mark.parametrize(
    ("peak", "kind", "text"),
    [
        (7 * GIB, RunCrashed, "the program used 7516192768 of the board's 8589934592 bytes"),
        (
            GIB,
            BoardUnfit,
            "killed the program at 1073741824 bytes; other processes use the rest of the board's 8589934592",
        ),
    ],
)
def test_out_of_memory_blames_largest_user(peak, kind, text):
    error = make_memory_error(peak, 8 * GIB)
    assert type(error) is kind and text in error.message and error.hint
