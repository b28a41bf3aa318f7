"""Data for the tests of reports: run folders in the formats that the trainer writes, and steps for verdicts."""

import base64
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from PIL import Image

from kasoku.report import StepFacts
from kasoku.report.ledger import STEP

FACTS = StepFacts(device="cpu", batch=64, layers=10, layer_s=5e-5, parameters=1_000_000, threads=2, cores=2)


def step(**row_ms: float) -> dict[str, float]:
    """A healthy step of 20 ms, but for the rows given."""
    usual = {"forward": 6.0, "backward": 12.0, "update": 1.5, "input": 0.3, "other": 0.2}
    return {row: (usual | row_ms).get(row, 0.0) / 1000 for row in STEP}


ROWS = {
    "import": 1.9,
    "data": 0.2,
    "run folder": 0.05,
    "compile": 0.4,
    "input": 0.35,
    "copy": 0.02,
    "forward": 2.1,
    "backward": 3.9,
    "exposed": 0.3,
    "update": 0.6,
    "evaluate": 0.5,
    "save": 0.15,
    "other": 0.1,
}


def ledger(ranks: int = 2, line: str = "12 % of a step waits for its images") -> dict[str, Any]:
    rows = [{row: s * (1 + 0.1 * rank * (row == "backward")) for row, s in ROWS.items()} for rank in range(ranks)]
    cause = {"cause": "input-bound", "share": 0.12, "line": line, "remedy": "pack the images once (kasoku pack)"}
    return {
        "wall_s": sum(ROWS.values()),
        "rows": ROWS,
        "beside": {"compiler": 0.8},
        "step_s": {"input": 3e-4, "copy": 0.0, "forward": 2e-3, "backward": 4e-3, "exposed": 2e-4, "update": 6e-4},
        "verdict": [cause],
        "ranks": rows,
    }


def timeline(ranks: int = 2, steps: int = 3, name: str = "layer") -> dict[str, Any]:
    spans = []
    for rank in range(ranks):
        at = 0.0001 * rank
        for step in range(steps):
            for kind, takes in (("input", 0.0004), ("forward", 0.002), ("backward", 0.004), ("update", 0.0006)):
                stream = "input" if kind == "input" else "compute"
                span = {"kind": kind, "name": f"{name} {step}", "start": at, "stop": at + takes, "rank": rank}
                spans.append({**span, "bytes": 0, "stream": stream})
                if kind == "backward":
                    sent = {"kind": "exposed", "name": "group 0", "rank": rank}
                    sent |= {"start": at + 0.003, "stop": at + 0.0038}
                    spans.append({**sent, "bytes": 2**20, "stream": "compute"})  # inside
                    spans.append({**sent, "bytes": 2**20, "stream": "link"})
                at += takes
    return {"spans": spans}


def tuning() -> dict[str, Any]:
    samples = []
    for batch in (16, 32, 64, 96, 128, 256, 512):
        step_s = 0.004 + 0.0001 * batch + (0.01 if batch > 200 else 0)
        measured = {"step_s": step_s, "low_s": 0.97 * step_s, "high_s": 1.04 * step_s, "images_per_s": batch / step_s}
        more = {"utilisation": 0.9, "epochs": None, "goodput": batch / step_s * 100 / (100 + batch), "failed": ""}
        samples.append({"batch": batch, **measured, **more})
    samples.append({"batch": 1024, "step_s": 0.0, "low_s": 0.0, "high_s": 0.0, "failed": "out of memory"})
    found = {"what": "minibatch", "strategy": "TimeToTarget", "chosen": 96, "samples": samples}
    return {**found, "why": "it is done soonest", "spent_s": 12.5, "budget_s": 60.0}


def profile() -> dict[str, Any]:
    """Of two ranks, a step of 10 ms each."""
    gap = [["kernels", 0.0, 0.001, 1.0], ["kernels", 0.004, 0.01, 1.0]]
    full = [["input", 0.0, 0.001, 0.5], ["forward and backward", 0.001, 0.01, 1.0]]
    ranks = [
        {"rank": rank, "step_s": 0.01, "compute_s": compute_s, "input_s": 2.5e-4, "wait_s": wait_s, "idle": idle}
        | {"bottleneck": "compute-bound", "iterations": [{"step_s": 0.01, "idle_s": idle_s, "used": used}]}
        for rank, (compute_s, wait_s, idle, idle_s, used) in enumerate(
            [(0.006, 0.003, 0.3, 0.003, gap), (0.009, 5e-4, 0.05, 0.001, full)]
        )
    ]
    block = {"name": "stage.0", "forward_s": 0.001, "backward_s": 0.002}
    return {
        "ranks": ranks,
        "blocks": [{**block, "parameter_bytes": 2**20, "saved_bytes": 2**21}],
        "operators": [{"name": "aten::mm", "calls": 1000, "host_s": 0.003, "device_s": 0.004}],
        "iterations": ranks[0]["iterations"],
        "bounds": dict.fromkeys(("flops", "bytes", "flops_per_s", "bytes_per_s", "least_s", "reached", "step_s"), 0.5),
    }


def classes(names: tuple[str, ...] = ("cat", "dog", "bird")) -> dict[str, Any]:
    n = len(names)
    counts = [[k, other, 40 + k if k == other else (k + 2 * other) % 3] for k in range(n) for other in range(n)]
    worst = [
        {
            "name": f"{name}/{i}.jpg",
            "label": name,
            "predicted": names[(i + 1) % n],
            "loss": 5.0 - i,
            "png": png(60 * i % 256),
        }
        for i, name in enumerate(names)
    ]
    return {"classes": list(names), "confusion": counts, "worst": worst}


def png(level: int) -> str:
    out = io.BytesIO()
    Image.new("L", (8, 8), level).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode("ascii")


def write(folder: Path, **parts: Any) -> None:
    for part, found in parts.items():
        (folder / f"{part}.json").write_text(found if isinstance(found, str) else json.dumps(found))


def run_folder(folder: Path, *, seed: int = 0, lr: float = 0.1, target: float = 0.98, **result: Any) -> Path:
    """A run that was never trained: its recipe, and what came out."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        f'epochs = 3\nbatch = 64\nseed = {seed}\n[model]\nuse = "kasoku.models.cnn11"\n'
        f'[data]\nuse = "kasoku.data.digits"\n[optimizer]\nuse = "kasoku.optim.sgd"\nlr = {lr}\n'
        f"[evaluate]\ntarget = {target}\n"
    )
    whole = {"top1": 0.97, "best_top1": 0.97, "time_to_target_s": None, "seconds": 9.0, "images_per_s": 1000.0}
    seconds_by = {"import": 2.0, "forward": 3.0, "backward": 4.0}
    write(folder, result={**whole, "seconds_by": seconds_by, "epochs": 3.0, "stopped": None, **result})
    machine = {"cpu": "c", "cores": 2}
    write(folder, environment={"command": ["kasoku", "train", "recipes/digits.toml"], "machine": machine})
    lines = []
    for i in range(7):
        lines.append({"step": 20 * i, "epoch": 0.5 * i, "seconds": i, "loss": 2 / (i + 1), "lr": 0.1 * (6 - i)})
    lines += [{"step": 44 * i, "epoch": i, "seconds": 2 * i, "test_top1": 1 - 0.5**i} for i in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 99, "ep')
    return folder


def text_of(file: Path) -> str:
    """What is written on it, without scripts and tags."""
    body = re.sub(r"(?s)<(script|style).*?</\1>", "", file.read_text())
    return unescape(re.sub(r"<[^>]*>", " ", body))
