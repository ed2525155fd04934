"""What a recipe tells of its work, kept beside the model that it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "hil-recipe.json"


def recipe_notes(model: Path) -> dict[str, Any]:
    """What the recipe told that made a model: ``quantise_s``, the seconds that it took. Empty where none made it."""
    file = model.with_name(FILE)
    if not file.is_file():
        return {}
    notes: dict[str, Any] = json.loads(file.read_bytes())
    return notes
