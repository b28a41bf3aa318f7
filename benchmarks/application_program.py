"""The other program of application.py: it knows a file that `kasoku export` wrote, and no kasoku.

    python benchmarks/application_program.py FILE PHOTO...

FILE: .onnx (read by onnxruntime) or .pt2 (by torch.export). It prints one JSON line: each photo's likeliest class and
its probability. Importing kasoku fails in this process.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from PIL import Image

sys.modules["kasoku"] = None  # type: ignore[assignment]  # from here on `import kasoku` raises ImportError

Network = Callable[[np.ndarray], np.ndarray]


def opened(file: str) -> tuple[Network, Mapping[str, str]]:
    """The network, and what the file says of itself."""
    if file.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        facts = session.get_modelmeta().custom_metadata_map
        return lambda pixels_NCHW: session.run(None, {"pixels": pixels_NCHW})[0], facts
    import torch

    extra = {"kasoku.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    return lambda pixels_NCHW: program(torch.from_numpy(pixels_NCHW)).detach().numpy(), json.loads(extra["kasoku.json"])


def pixels(photo: str, side: int, height: int, width: int) -> np.ndarray:
    """A photo as the file's `resize` asks for: a JPEG decoded smaller, the shorter side to `side`, then the middle."""
    image = Image.open(photo)
    scale = side / min(image.size)
    image.draft(None, [int(scale * length) + 1 for length in image.size])
    scale = side / min(image.size)
    image = image.convert("RGB").resize([round(scale * length) for length in image.size], Image.Resampling.BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    middle = image.crop((left, top, left + width, top + height))
    return np.asarray(middle, np.float32).transpose(2, 0, 1) / 255


def main(file: str, photos: Sequence[str]) -> None:
    network, facts = opened(file)
    classes = json.loads(facts["classes"])
    wanted = re.match(r"shorter side to (\d+), .*the middle (\d+) x (\d+)", facts["resize"])
    if not wanted:
        raise ValueError(f"photos for another program: {facts['resize']}")
    answers = {}
    for photo in photos:
        logits_K = network(pixels(photo, *map(int, wanted.groups()))[None])[0].astype(np.float64)
        shares_K = np.exp(logits_K - logits_K.max())
        shares_K /= shares_K.sum()
        answers[photo] = [classes[shares_K.argmax()], float(shares_K.max())]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
