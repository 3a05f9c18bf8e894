# SPDX-License-Identifier: Apache-2.0
"""Whether the kernels may take the whole GPU at once."""

from __future__ import annotations

import torch


def set_cooperative(on: bool) -> None:
    """Allows or forbids cooperative launches on CUDA, in this process, for every call from now on.

    They are forbidden at first. A cooperative launch reads a channels_last tensor of up to some 10 MiB once
    instead of twice, which takes less time. But it starts when all of its blocks find a place on the GPU, so
    it waits for whatever stays there: beside NCCL's collectives (DDP and FSDP overlap them with the backward
    pass) that can be many times longer than it runs. Allow it where the process has the GPU to itself, as in
    inference. The bits are the same. Without the CUDA library there is nothing to allow.

    Raises:
        ValueError: `on` is no bool.

    Example:
        >>> import steadynorm
        >>> steadynorm.set_cooperative(True)
        >>> steadynorm.set_cooperative(False)
    """
    if not isinstance(on, bool):
        raise ValueError(f"set_cooperative: on must be True or False, got {on!r}")
    if hasattr(torch.ops.steadynorm, "set_cooperative"):
        torch.ops.steadynorm.set_cooperative(on)
