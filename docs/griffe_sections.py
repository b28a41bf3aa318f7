"""Shows the sections that docstrings here have besides Google's (Saves, Costs, Maths, Ref) as a list."""

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Saves|Costs|Maths|Ref|Seen): (.*(?:\n(?!\n|\w+:).+)*)", re.MULTILINE)


class Sections(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each class, function, attribute and module."""
        if obj.docstring:
            obj.docstring.value = SECTION.sub(listed, obj.docstring.value).replace("\n\n\n", "\n\n")


def listed(match: re.Match[str]) -> str:
    """One section as an item of a list, on one line."""
    return f"\n- **{match[1]}:** {' '.join(match[2].split())}\n"
