"""Private attributes of torch without a public equivalent, each with the torch version it was checked on."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import dataloader

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# BatchNorm as torch.nn calls it, with the statistics and the reserve that its backward reads (2.13).
batch_norm: Any = torch.ops.aten._batch_norm_impl_index
batch_norm_backward: Any = torch.ops.aten._batch_norm_impl_index_backward
# (gradients, overflow, factor): multiplies them by it; sets overflow to 1 where one of them is not finite (2.13).
unscale_and_check: Any = torch._amp_foreach_non_finite_check_and_unscale_
data_loader_iterator: Any = dataloader._BaseDataLoaderIter  # the class of the iterators of torch's DataLoader (2.13)
# (function): calls it when the running backward has computed its gradients, before DDP waits for buckets (2.13).
at_end_of_backward: Any = torch.autograd.Variable._execution_engine.queue_callback
cuda_is_lost_to_forks: Callable[[], bool] = torch.cuda._is_in_bad_fork  # its parent had asked for a GPU (2.13)


class _Call(partial[Any]):
    """The call of a module in place of its own; a copy of the module, and one that is saved, goes without it."""

    def __reduce__(self) -> Any:
        return type(None), ()


def replace_call(module: nn.Module, around: Callable[..., Any]) -> Callable[[], object]:
    """Has the calls of a module go to around(module, call, ...), until the result is called (2.13)."""
    own, kept = vars(module).get("_compiled_call_impl"), weakref.ref(module)
    vars(module)["_compiled_call_impl"] = _Call(around, module, own or module._call_impl)
    return lambda: [vars(m).update(_compiled_call_impl=own) for m in [kept()] if m is not None]


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, or its forward, was compiled (2.13)."""
    own = vars(module)
    return hasattr(own.get("forward"), "_torchdynamo_orig_callable") or own.get("_compiled_call_impl") is not None


def version(x: Tensor) -> int:
    """How often x was written in place (2.13)."""
    return x._version


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether its `step` runs the hooks of steps (2.13)."""
    return hasattr(type(optimizer).step, "hooked")


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether one of torch's schedulers was made for it (2.13)."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def module_hooks(module: nn.Module) -> list[Any]:
    """Its forward and backward hooks of all kinds (2.13)."""
    return [hook for name in _MODULE_HOOKS for hook in getattr(module, name).values()]


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Its forward pre-hooks, in the order in which they run (2.13)."""
    return [*module._forward_pre_hooks.values()]


def gradient_hooks(p: Tensor) -> list[Any]:
    """The hooks on its gradient, before and after it is accumulated (2.13)."""
    after: dict[int, Any] = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return [*(p._backward_hooks or {}).values(), *after.values()]


def accumulates(node: Any) -> bool | None:
    """Whether the backward that is running adds to the `.grad` of a leaf, by its AccumulateGrad `node` (2.13).

    None: `torch.autograd.grad` returns this gradient to its caller. Only within a backward.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises it for torch.autograd.grad
        return None


def recompile_limit(forms: int) -> AbstractContextManager[None]:
    """Within it torch.compile keeps at least so many compiled forms of a function, one for each shape (2.13)."""
    config: Any = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit")
    manager: AbstractContextManager[None] = config.patch({name: max(getattr(config, name), forms) for name in names})
    return manager


def compiled_forms() -> int:
    """How many compiled forms of a function torch.compile keeps (2.13)."""
    config: Any = torch._dynamo.config
    return int(config.recompile_limit)


def remove_step_hooks(optimizer: Optimizer) -> None:
    """Leaves an optimizer without hooks around its step (2.13)."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def abort_nccl(group: Any) -> None:
    """Aborts the NCCL communicators of a process group, if it has any (2.13; not yet seen on a GPU)."""
    with suppress(RuntimeError):
        group._get_backend(torch.device("cuda")).abort()


def cpu_computes_bf16() -> bool:
    """Whether this CPU has bfloat16 instructions: avx512_bf16 or AMX (2.13)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
