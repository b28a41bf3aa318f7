"""torch.compile, block by block.

Note: compile the forward of each block. `block.forward` is replaced by its compiled form: gradients fire block by
block, pre-hooks run outside the graph, names stay. `block.compile()` would trace the hooks and give different weights
on different ranks without a word; `torch.compile(block)` renames state_dict keys; compiling the whole model fires
every gradient hook at the end of backward. The class's function is compiled and bound to each block, so equal blocks
share code and a deep copy of the model runs its own weights.
"""

import importlib.util
import shutil
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kasoku.core import InputError, Job, Stage, Technique, say
from kasoku.core.blocks import blocks, stays_in_place
from kasoku.core.torch_internals import recompile_limit

_LIMIT = 64  # compiled forms a function may have: blocks of one class, in training and in evaluation
_BREAKS = "a block that compiles anew breaks a capture; leave Graphs out, or Compile for small models"


@dataclass(frozen=True)
class Compile(Technique, stage=Stage.COMPILE, refuses={"captures_graph": _BREAKS}, compiles_model=True):
    """Compiles the forward of each block (torch.compile), but not where SavedMemory runs layers; a line says so.

    Args:
        backend: "inductor" generates kernels; "aot_eager" and "eager" serve tests.

    Saves: time on GPUs: element-wise layers fuse.
    Costs: the first steps, which compile: tens of seconds; again for each new input shape.
    Ref: Ansel et al. 2024, PyTorch 2.
    """

    backend: str = "inductor"

    def __post_init__(self) -> None:
        names = torch.compiler.list_backends(exclude_tags=None)
        if self.backend not in names:
            raise InputError(f'backend="{self.backend}": one of {", ".join(sorted(names))}')

    def apply(self, job: Job) -> None:
        """Compiles every block that has parameters; at the first forward, in fact."""
        kinds = {p.device.type for p in job.model.parameters()}
        if self.backend == "inductor" and kinds <= {"cpu"} and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise InputError('Compile(backend="inductor") needs a C++ compiler on a CPU: install g++')
        if self.backend == "inductor" and "cuda" in kinds and importlib.util.find_spec("triton") is None:
            raise InputError('Compile(backend="inductor") needs triton on a GPU: pip install triton')
        job.patches.enter_context(recompile_limit(_LIMIT))
        compiled: dict[type, Callable[..., Any]] = {}
        learning = [block for _, block in blocks(job.model) or [("", job.model)] if [*block.parameters()]]
        free = [block for block in learning if not any(stays_in_place(module) for module in block.modules())]
        if (left := len(learning) - len(free)) and job.comm.rank == 0:
            say(f"Compile: {left} of {len(learning)} blocks are not compiled, since SavedMemory runs their layers")
        for block in free:
            if "forward" in vars(block):
                job.patch(block, "forward", self._compile(block.forward))
            else:
                kind = type(block)
                compiled[kind] = compiled.get(kind) or self._compile(kind.forward)
                job.patch(block, "forward", types.MethodType(compiled[kind], block))

    def _compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(forward, backend=self.backend, dynamic=False)
