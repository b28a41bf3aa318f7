"""Pages of the manual: their links, their blocks, and a reader who types what they say.

What a test must know is in HTML comments right above a block, which a reader does not see:
  <!-- test: add --set epochs=0.2 -->  the reader adds this to each command of the block that has the first one's verb
  <!-- test: skip REASON -->           the block is not run
  <!-- test: exits 2 -->               the exit code of the block's commands
A block with a title, such as ```python title="loop.py", or whose first line is # loop.py, is a file that later commands
of the page use.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from helpers.forked import rank
from kasoku.cli import main
from kasoku.distributed import local_launch

ROOT = Path(__file__).parent.parent.parent
LANGUAGES = ("console", "python", "toml", "json", "text", "diff", "csv", "yaml")
COMMENT = re.compile(r"<!-- test: (add|skip|exits) (.*?) -->")
LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$")
SHELL = re.compile(r"[|<>;&`$]")  # leave it to a shell


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, the file it is, and what its comments say."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    notes: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, without comments: a line each, or several that end with a backslash."""
        lines = [re.sub(r"(^|\s+)# .*$", "", line) for line in self.text.replace("\\\n", " ").splitlines()]
        return [line.strip() for line in lines if line.strip()]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = page.read_text().splitlines()
    notes: dict[str, str] = {}
    i = 0
    while i < len(lines):
        fence = re.match(r"^\s*(```+|~~~+)\s*(\S*)(.*)$", lines[i])
        if not fence:
            found = COMMENT.findall(lines[i])
            notes = notes | dict(found) if found else {}
            i += 1
            continue
        end = next((j for j in range(i + 1, len(lines)) if lines[j].strip() == fence[1]), len(lines))
        body = "\n".join(lines[i + 1 : end]) + "\n"
        title = re.search(r'title="([^"]+)"', fence[3]) or re.match(r"# (\w+\.py)\n", body)
        yield Block(page, i + 1, fence[2], title[1] if title else "", body, notes)
        notes, i = {}, end + 1


def prose(page: Path) -> str:
    """A page without its blocks, its comments and its code."""
    text = re.sub(r"^\s*(```+|~~~+).*?^\s*\1\s*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings that forges and mkdocs make alike; of equal headings, that of the first."""
    found: set[str] = set()
    for line in prose(page).splitlines():
        if heading := HEADING.match(line):
            words = re.sub(r"[^\w\s-]", "", heading[1].lower()).strip()
            if re.sub(r"\s", "-", words) == re.sub(r"[\s-]+", "-", words):
                found.add(re.sub(r"\s", "-", words))
    return found


def dead_links(page: Path) -> list[str]:
    """The links of a page within the project that lead nowhere, each with the reason."""
    dead = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z+]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or not file.is_relative_to(ROOT):
            dead.append(f"{page.relative_to(ROOT)}: {target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            dead.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
    return dead


class Reader:
    """Somebody who types the commands of a page, one after the other, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = types.ModuleType("__page__")  # what the page's Python has defined so far
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def read(self, block: Block) -> bool:
        """Does what a block says; returns whether there was anything to do. Fails with its place and output."""
        if block.title:
            (self.folder / block.title).write_text(block.text)
        elif block.language == "python":
            self._execute(block)
        elif block.language == "console":
            words = block.commands[0].split()
            for command in block.commands:
                more = block.notes.get("add", "") if command.split()[:2] == words[:2] else ""
                self._run(block, f"{command} {more}".strip())
        else:
            if block.language == "toml":
                tomllib.loads(block.text)
            return False
        return True

    def _execute(self, block: Block) -> None:
        sys.modules[self.module.__name__] = self.module  # where dataclasses look up their annotations
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                exec(compile("\n" * block.line + block.text, str(block.page), "exec"), vars(self.module))
        finally:
            del sys.modules[self.module.__name__]

    def _run(self, block: Block, command: str) -> None:
        wanted = int(block.notes.get("exits", "0"))
        print(f"\n$ {command}", flush=True)
        if command.startswith("kasoku ") and not SHELL.search(command):
            code, output = self._kasoku(shlex.split(command, comments=True)[1:]), "see above"
        else:
            place = ROOT if command.startswith("make ") else self.folder
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=place,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            code, output = done.returncode, done.stdout + done.stderr
        assert code == wanted, f"{block.place}: {command}: exit code {code} instead of {wanted}\n{output}"

    def _kasoku(self, words: list[str]) -> int:
        """The command in this process, and its ranks in forked ones, which saves the 3 s of each one's imports."""
        expanded = [name for word in words for name in (sorted(glob.glob(word)) or [word] if "*" in word else [word])]
        with warnings.catch_warnings(), mock.patch.object(local_launch, "subprocess", SimpleNamespace(Popen=rank)):
            warnings.simplefilter("default")
            try:
                return main(expanded)
            except SystemExit as ended:  # --help, --version, and what argparse refuses
                return int(ended.code or 0)
