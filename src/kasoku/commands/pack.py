"""`kasoku pack`: packs images into tar shards, or checks a pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kasoku.commands import CommandArguments, argument, option
from kasoku.core import InputError
from kasoku.data.packs.writer import pack, verify


@dataclass(frozen=True, kw_only=True)
class PackArguments(CommandArguments):
    """The arguments of `kasoku pack`."""

    source: str | None = argument(nargs="?", metavar="SRC", help="a folder of images, or tar shards; or their address")
    target: str | None = argument(nargs="?", metavar="DST", help="the folder for the pack")
    side: int = option(default=256, help="shorter side in pixels; 0: as it is (default: 256)")
    format: Literal["jpeg", "raw"] = option(choices=("jpeg", "raw"), default="jpeg", help="raw: pixels (default: jpeg)")
    quality: int = option(default=90, help="of JPEG (default: 90)")
    workers: int = option(default=0, help="threads (default: one a core)")
    verify: str | None = option(metavar="DIR", help="check that a pack is whole, by its checksums")
    quiet: bool = option(default=False, help="no progress bar")
    if_interrupted: ClassVar[str] = "the shards that are whole stay, and the same command goes on there"


def run(arguments: PackArguments) -> int:
    """Packs, or verifies; returns the exit code."""
    a = arguments
    if a.verify and not (a.source or a.target):
        print(verify(a.verify))
    elif a.source and a.target and not a.verify:
        form: dict[str, Any] = {"side": a.side, "format": a.format, "quality": a.quality}
        print(pack(a.source, a.target, **form, workers=a.workers, quiet=a.quiet))
    else:
        raise InputError("kasoku pack: SRC DST to pack, or --verify DIR to check a pack")
    return 0
