"""Show Sphinx roles as code on the site. This is an extension of griffe, which reads the docstrings."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")


class DocstringRoles(Extension):
    """Replace :class:`hil.Name` by `hil.Name`, which Markdown shows as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
