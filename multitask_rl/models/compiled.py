"""``torch.compile`` for the parts of a model that are many small operations: norms and feed-forward blocks.

Whole layers would be compiled again for each of them and for every kind of cache and mask; these blocks take
one tensor, whatever the model does around them, and sampling profits as training does.
"""

from __future__ import annotations

import os
import re
import shutil

from torch import nn

from multitask_rl.errors import ConfigError

__all__ = ["compile_blocks"]

_BLOCK = re.compile(r"(Norm|MLP|FeedForward)$")
_OWN_KERNELS = "torch.nn"
"""``nn.LayerNorm`` and its like are one kernel already."""


def compile_blocks(model: nn.Module) -> int:
    """Compile ``model``'s norms and feed-forward blocks in place, at their first use; return how many.

    Raises:
        ConfigError: the model has none that is known, or there is no compiler for its device.
    """
    blocks = [
        module
        for module in model.modules()
        if _BLOCK.search(type(module).__name__) and not type(module).__module__.startswith(_OWN_KERNELS)
    ]
    if not blocks:
        raise ConfigError(
            f"model.compile: {type(model).__name__} has no module whose class is named ...Norm, ...MLP or "
            "...FeedForward; set model.compile=false"
        )
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if on_cpu and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "model.compile: on a CPU torch.compile needs a C++ compiler and found neither g++ nor clang++; "
            "install one, name it in CXX, or set model.compile=false"
        )
    for block in blocks:
        block.compile(dynamic=True)
    return len(blocks)
