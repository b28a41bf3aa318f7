"""Changes pages of the manual for the site: as plain files on a forge they are read as they are.

Comments go: they speak to tests. Links to files outside of docs/ (examples, SECURITY.md) stay links where mkdocs.yml
has a `repo_url`, and are plain text where it has none. tests/test_docs.py checks that their targets exist.
"""

import re
from typing import Any

COMMENT = re.compile(r"[ \t]*<!--.*?-->\n?", re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """The text of a page, before it becomes HTML."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target})" if config.repo_url else text

    return OUTSIDE.sub(link, COMMENT.sub("", markdown))
