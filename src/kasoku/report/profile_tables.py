"""The files that `kasoku profile` writes, and the tables of profile.json that it prints and the page shows."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kasoku.core.files import write_text
from kasoku.report.bottleneck import StepBottleneck, StepFacts, find_bottlenecks
from kasoku.report.ledger import ledger_documents
from kasoku.report.profiler import Iteration, StepProfile
from kasoku.report.progress_bar import print_table

_MAX_ROWS = 12


def ms(seconds: float) -> str:
    """Seconds, written in milliseconds."""
    return f"{1000 * seconds:,.3f}"


def mib(size: float) -> str:
    """Bytes, written in MiB."""
    return f"{size / 2**20:,.1f}"


Document = Mapping[str, Any]
Profiled = tuple[StepProfile, Mapping[str, float], StepFacts]  # of a rank, with its mean step
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
    if blocks:
        yield _table("blocks, the slowest first", _BLOCK, blocks)
        yield _table("operators, over the traced steps", _OPERATOR, document["operators"])
    idle = [step["idle_s"] / max(step["step_s"], 1e-9) for step in document["iterations"]]
    facts = {"idle in each iteration": " ".join(f"{share:.0%}" for share in idle)}
    if b := document["bounds"]:  # of a recipe, not of a script
        at_s, place, most = max(document["memory"], key=lambda sample: sample[2])
        facts |= {
            "memory, at most": f"{mib(most)} MiB, {ms(at_s)} ms into a step ({place})",
            "FLOPs of a step": f"{b['flops'] / 1e9:,.3f} G; this device did {b['flops_per_s'] / 1e9:,.0f} G/s",
            "bytes of a step": f"{mib(b['bytes'])} MiB; this device moved {mib(b['bytes_per_s'])} MiB/s",
            "bound": f"{ms(b['least_s'])} ms at least, {b['reached']:.0%} of a step's {ms(b['step_s'])} ms",
        }
    yield "the device", [], [[name, line] for name, line in facts.items()]


def _table(title: str, columns: Columns, items: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    rows = [[form(item[key]) for key, form in columns.values()] for item in items[:_MAX_ROWS]]
    return title, list(columns), rows


def write_profile(to: Path | None, profiles: Sequence[Profiled], document: Document, timeline: Document) -> Document:
    """Prints a profile, of all ranks with the ledger's documents, and writes it to a folder; returns profile.json."""
    first, *others = [asdict(each) for each, _, _ in profiles]
    first["ranks"] = _by_rank(profiles)
    step_s: dict[str, float] = document["step_s"]
    whole_s = sum(step_s.values())
    rows = {row: f"{ms(s)} ms  {s / max(whole_s, 1e-9):.0%}" for row, s in step_s.items() if s > 0}
    print_table("a step, the median", {**rows, "in all": f"{ms(whole_s)} ms"})
    for title, head, cells in profile_tables(first):
        print_table(title, cells, head)
    if others:
        print(_slowest(first["ranks"]))
    for cause in document["verdict"]:
        print(StepBottleneck(**cause))
    files = {"profile.json": first, "ledger.json": document, "timeline.json": timeline}
    files |= {f"profile-{i}.json": other for i, other in enumerate(others, 1)}
    if to:
        for name, content in files.items():
            write_text(to / name, json.dumps(content, indent=1) + "\n")
        traced = ", trace.json (open it in chrome://tracing or Perfetto)" if (to / "trace.json").exists() else ""
        print(f"{to}: {', '.join(files)}{traced}")
    return first


def _by_rank(profiles: Sequence[Profiled]) -> list[dict[str, Any]]:
    """What each rank does in the mean step, in rank order: seconds, the share that its device is idle, the verdict."""
    transfer_s = min(step["exposed"] for _, step, _ in profiles)  # longer waits are for other ranks
    return [
        {
            "rank": rank,
            "step_s": sum(step.values()),
            "compute_s": sum(step[row] for row in ("forward", "backward", "update")),
            **{f"{row}_s": step[row] for row in ("forward", "backward", "update")},
            "input_s": step["input"],
            "wait_s": step["exposed"],
            "idle": statistics.fmean(each.idle_s / max(each.step_s, 1e-9) for each in profile.iterations),
            "bottleneck": find_bottlenecks([step], facts, profile.bounds, transfer_s=transfer_s)[0].cause,
            "iterations": [asdict(each) for each in profile.iterations],
        }
        for rank, (profile, step, facts) in enumerate(profiles)
    ]


def _slowest(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A line that names the slowest rank."""
    own_s = [row["step_s"] - row["wait_s"] for row in ranks]
    last = own_s.index(max(own_s))
    more = own_s[last] / max(1e-9, statistics.median(own_s[:last] + own_s[last + 1 :])) - 1
    work = f"{ms(own_s[last])} ms of its own work a step, {more:.0%} more than the other ranks"
    return f"slowest: rank {last}, {work}; {ranks[last]['bottleneck']}"


def report_ranks(ranks: Sequence[Document], folder: Path | None) -> None:
    """Prints, and writes to a folder, what `ScriptTimer.finish` gave on each rank."""
    facts, profiles = [StepFacts(**rank["facts"]) for rank in ranks], list[Profiled]()
    for rank, own in zip(ranks, facts, strict=True):
        step_s, idle_s = sum(rank["mean_s"].values()), sum(rank["mean_s"][row] for row in ("input", "exposed", "other"))
        profiles.append((StepProfile([], [], [Iteration(step_s, idle_s)], [], {}), rank["mean_s"], own))
    write_profile(folder, profiles, *ledger_documents(ranks, facts[0]))
