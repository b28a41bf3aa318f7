"""The tables of profile.json, as `kasoku profile` prints them and the page shows them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_MAX_ROWS = 12


def ms(seconds: float) -> str:
    """Seconds, written in milliseconds."""
    return f"{1000 * seconds:,.3f}"


def mib(size: float) -> str:
    """Bytes, written in MiB."""
    return f"{size / 2**20:,.1f}"


Columns = Mapping[str, tuple[str, Callable[[Any], str]]]  # head: key, how its value is written
_RANK: Columns = {
    "rank": ("rank", str),
    "computes, ms": ("compute_s", ms),
    "waits for others, ms": ("wait_s", ms),
    "waits for input, ms": ("input_s", ms),
    "device idle": ("idle", "{:.0%}".format),
    "bottleneck": ("bottleneck", str),
}
_BLOCK: Columns = {
    "block": ("name", str),
    "forward, ms": ("forward_s", ms),
    "backward, ms": ("backward_s", ms),
    "parameters, MiB": ("parameter_bytes", mib),
    "kept for backward, MiB": ("saved_bytes", mib),
}
_OPERATOR: Columns = {
    "operator": ("name", str),
    "calls": ("calls", "{:,}".format),
    "host, ms": ("host_s", ms),
    "device, ms": ("device_s", ms),
}


def profile_tables(document: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, head, rows) of each table; those of what was not measured are left out."""
    blocks = sorted(document["blocks"], key=lambda block: -(block["forward_s"] + block["backward_s"]))
    yield _table("a step of each rank, the mean", _RANK, document["ranks"])
    if not blocks:  # of a script
        return
    yield _table("blocks, the slowest first", _BLOCK, blocks)
    yield _table("operators, over the traced steps", _OPERATOR, document["operators"])
    idle = [step["idle_s"] / max(step["step_s"], 1e-9) for step in document["iterations"]]
    b = document["bounds"]
    by = "bytes" if b["least_s"] > 1.01 * b["flops"] / b["flops_per_s"] else "FLOPs"
    facts = {
        "idle in each iteration": " ".join(f"{share:.0%}" for share in idle),
        "FLOPs of a step": f"{b['flops'] / 1e9:,.3f} G; this device did {b['flops_per_s'] / 1e9:,.0f} G/s",
        "bytes of a step": f"{mib(b['bytes'])} MiB; this device moved {mib(b['bytes_per_s'])} MiB/s",
        "bound": f"{ms(b['least_s'])} ms at least, by its {by}; {b['reached']:.0%} of a step's {ms(b['step_s'])} ms",
    }
    yield "the device", [], [[name, line] for name, line in facts.items()]


def _table(title: str, columns: Columns, items: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    rows = [[form(item[key]) for key, form in columns.values()] for item in items[:_MAX_ROWS]]
    return title, list(columns), rows
