"""Reports which block of a model is running, in forward and in backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import Job
from kasoku.core.blocks import blocks, ignores_values

BlockEvent = Callable[[str, str], None]  # (block, "forward" | "ended" | "backward")


def block_hooks(
    named_blocks: Iterable[tuple[str, nn.Module]],
    event: BlockEvent,
    is_active: Callable[[nn.Module], bool] = lambda block: True,
) -> list[Any]:
    """Calls event(block, what) when a block's forward begins and ends, and when its backward begins.

    A backward begins when the gradient of the block's output arrives. Blocks whose output is not a single tensor with a
    gradient have no backward event. Returns the handles of the hooks, except those on outputs.
    """

    def hook(name: str, block: nn.Module) -> tuple[Any, Any]:
        def before(module: nn.Module, _: object) -> None:
            if is_active(module):
                event(name, "forward")

        def after(module: nn.Module, _: object, output: object) -> None:
            if is_active(module):
                event(name, "ended")
                if isinstance(output, Tensor) and output.requires_grad:
                    register: Any = output.register_hook
                    register(lambda _: event(name, "backward"))

        pre, post = ignores_values(before), ignores_values(after)
        return block.register_forward_pre_hook(pre), block.register_forward_hook(post)

    return [handle for name, block in named_blocks for handle in hook(name, block)]


def follow_blocks(job: Job, enter: Callable[[str], None], is_due: Callable[[], bool]) -> None:
    """Calls enter(name) whenever another block starts to run; "" stands for no block. Active in training only.

    A block's backward lasts until the next block's backward begins. When a block's forward ends, the block that it
    interrupted continues: a backward that recomputes activations runs forwards inside itself. Ends when the job is
    closed. `is_due`: whether the current step is followed.
    """
    current = ""
    interrupted: list[str] = []

    def switch(name: str) -> None:
        nonlocal current
        current = name
        enter(name)

    def event(name: str, what: str) -> None:
        if what == "forward":
            interrupted.append(current)
        switch(name if what != "ended" else interrupted.pop() if interrupted else "")

    def is_active(module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled() and is_due()

    def begin(model: nn.Module, _: object) -> None:
        if is_active(model):
            interrupted.clear()
            switch("")

    job.on_close(job.model.register_forward_pre_hook(begin).remove)
    for handle in block_hooks(blocks(job.model), event, is_active):
        job.on_close(handle.remove)
