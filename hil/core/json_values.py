"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def jsonable(value: Any) -> Any:
    """The value with what JSON does not know made into texts (NaN, inf, bytes) and lists."""
    if value is None or isinstance(value, (str, int)):  # bool too; first, since it is most of what there is
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return jsonable(value.item())
    return str(value)
