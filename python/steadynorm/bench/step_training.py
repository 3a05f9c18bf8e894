# SPDX-License-Identifier: Apache-2.0
"""One training step of the full-size 3-D U-Net, whose GroupNorm sites change hands between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .step_arms import ARMS, Function
from .step_items import LOSS_RANGE, SITE_RANGE
from .unet import GROUPS, UNet, norm_sites

SEED = 0
CLASSES = 3
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
FORMAT = torch.channels_last_3d
PARAMETER_BYTES = 14  # weight, gradient and momentum in fp32, and autocast's copy in bf16


@dataclass(frozen=True)
class Scale:
    """A cube of 2**number voxels an edge, and `number` - 2 levels of which the deepest is 8 wide."""

    number: int
    width: int = 64  # channels at full resolution, doubled at each level

    @property
    def size(self) -> int:
        return 2**self.number

    @property
    def levels(self) -> int:
        return self.number - 2

    @property
    def sites(self) -> int:
        """GroupNorms: two in each block, a block for each level on the way down and each but one up."""
        return 2 * (2 * self.levels - 1)

    def shape(self, level: int) -> tuple[int, ...]:
        """Of a site's tensor: [1, C, X, Y, Z]."""
        return 1, self.width << level, *[self.size >> level] * 3

    def network(self) -> UNet:
        return UNet(self.width, self.levels, site, CLASSES, inputs=1)

    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.network().parameters())

    def need_bytes(self, arm: str) -> int:
        """An estimate of a step's peak, parameters and optimiser included."""
        values = sum(torch.Size(self.shape(level)).numel() for level in range(self.levels))
        return int(PARAMETER_BYTES * self.parameters() + ARMS[arm].held_bytes * values)


class Site(nn.GroupNorm):
    """GroupNorm and ReLU by `function`."""

    function: Function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.num_groups, self.weight, self.bias, self.eps)


def site(channels: int) -> tuple[nn.Module, nn.Module]:
    return Site(GROUPS, channels), nn.Identity()


def synthetic_volume(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`float32[1, 1, size, size, size]`: smooth blobs and noise, the same on every call; and the class of
    each voxel, `int64[1, size, size, size]`, by two thresholds on the blobs."""
    random = torch.Generator(device).manual_seed(SEED)
    coarse = torch.randn(1, 1, *[max(2, size // 8)] * 3, device=device, generator=random)
    smooth = F.interpolate(coarse, size=[size] * 3, mode="trilinear")
    noise = torch.randn(smooth.shape, device=device, generator=random)
    labels = torch.bucketize(smooth[:, 0], torch.tensor([-0.3, 0.3], device=device))
    return (smooth + 0.1 * noise).to(memory_format=FORMAT), labels


class Training:
    """One network, one optimiser and one volume for all arms: a step's memory is that of its own arm."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.scale, self.device = scale, device
        torch._dynamo.reset()  # compiled sites of another scale would count towards the shapes it keeps
        with device:
            self.network = scale.network().to(memory_format=FORMAT)
        self.sites = norm_sites(self.network)
        self.functions: dict[str, Function] = {}
        self.volume, self.labels = synthetic_volume(scale.size, device)
        self.restart()

    def restart(self) -> None:
        """Initial weights, the same on every call, and an optimiser without a past."""
        torch.manual_seed(SEED)
        for module in self.network.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.network.zero_grad(set_to_none=True)
        self.optimiser = torch.optim.SGD(self.network.parameters(), LEARNING_RATE, MOMENTUM, nesterov=True)

    def use(self, arm: str) -> None:
        if arm not in self.functions:
            self.functions[arm] = ARMS[arm].make()
        for _, module in self.sites:
            module.function = self.functions[arm]

    def forward(self) -> Tensor:
        """The loss. Averaged from each voxel's own: the fused average adds by atomics on CUDA."""
        with torch.autocast(self.device.type, torch.bfloat16):
            scores = self.network(self.volume)
        with torch.profiler.record_function(LOSS_RANGE):
            return F.cross_entropy(scores.float(), self.labels, reduction="none").mean()

    def backward(self) -> Tensor:
        """Forward and backward; the gradients stay in the parameters. Returns the loss."""
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed_step(self) -> tuple[float, float | None]:
        """Milliseconds of a step, launches and waits included; and the most MiB allocated meanwhile."""
        cuda = self.device.type == "cuda"
        self.synchronise()
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        self.step()
        self.synchronise()
        ms = 1e3 * (time.perf_counter() - began)
        return ms, torch.cuda.max_memory_allocated(self.device) / 2**20 if cuda else None

    @contextlib.contextmanager
    def annotated(self) -> Iterator[None]:
        """Names each site's forward to the profiler."""
        handles, open_ranges = [], []

        def enter(name: str):
            def hook(*_) -> None:
                open_ranges.append(torch.profiler.record_function(f"{SITE_RANGE}{name}"))
                open_ranges[-1].__enter__()

            return hook

        def leave(*_) -> None:
            open_ranges.pop().__exit__(None, None, None)

        for name, module in self.sites:
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms that give the same bits where PyTorch has them; where not, it warns and runs what it has."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._dynamo.reset()  # compiled sites depend on the switch: earlier ones would count towards its limit
    cudnn.deterministic, cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
