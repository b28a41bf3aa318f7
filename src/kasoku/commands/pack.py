"""`kasoku pack`: packs images into tar shards, or checks a pack."""

from typing import Any

from kasoku.commands.arguments import PackArguments
from kasoku.core import InputError
from kasoku.data.packs.writer import pack, verify


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
