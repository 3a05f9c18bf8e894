# SPDX-License-Identifier: Apache-2.0
"""Whether a step gives the same bits again, and where two arms of it first differ.

Run as a module it makes one step of each arm and prints the bits of the loss and of every gradient, a line
of JSON an arm: `bench step` starts it several times and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .output import failure
from .step_training import Scale, Training, deterministic

CHUNK = 1 << 24  # values that are mixed at once: eight bytes each, a few times
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPREAD, MIX = -0x61C8864680B583EB, -0x4B47D0C5E4C1A1F3  # odd, so that multiplying loses nothing


def digest(tensor: Tensor) -> str:
    """64 bits of a tensor's bits and their places, in logical order; one value that differs changes them.

    Made on the tensor's device: sums of integers wrap around, so that their order is no matter.
    """
    bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64, copy=True)
        part += torch.arange(start, start + part.numel(), device=tensor.device) * SPREAD
        part ^= (part >> 31) & 0x1FFFFFFFF
        part *= MIX
        total += (part ^ ((part >> 29) & 0x7FFFFFFFF)).sum()
    return f"{int(total) & (1 << 64) - 1:016x}"


def one_step(training: Training, arm: str) -> dict:
    """The loss and the digest of each gradient of a step from the initial weights."""
    training.use(arm)
    training.restart()
    loss = training.backward()
    gradients = {name: digest(p.grad) for name, p in training.network.named_parameters()}
    training.network.zero_grad(set_to_none=True)
    return {"arm": arm, "loss": float(loss).hex(), "gradients": gradients}


def compare(steps: list[dict]) -> dict:
    """Of one arm in several processes: whether all bits agree, else what differs first in backward."""
    first = steps[0]
    names = list(first["gradients"])
    different = [
        name for name in names if any(s["gradients"][name] != first["gradients"][name] for s in steps)
    ]
    losses = [float.fromhex(step["loss"]) for step in steps]
    return {
        "processes": len(steps),
        "losses": losses,
        "same_loss": len({step["loss"] for step in steps}) == 1,
        "gradients": len(names),
        "different_gradients": len(different),
        "first_different": different[-1] if different else None,  # backward goes from the last to the first
        "same": not different and len({step["loss"] for step in steps}) == 1,
    }


def processes(count: int, scales: list[Scale], arms: list[str], device: torch.device) -> Iterator[dict]:
    """One line of each of `count` processes for each scale and arm; an arm that fails has an error."""
    command = [sys.executable, "-m", __name__, "--device", str(device), "--arms", ",".join(arms)]
    command += ["--scales", ",".join(str(scale.number) for scale in scales), "--width", str(scales[0].width)]
    # The library that multiplies matrices needs it for the same bits, and reads it when it is loaded.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    for process in range(count):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            try:
                for line in child.stdout:
                    if line.startswith("{"):
                        yield {"process": process, **json.loads(line)}
            except BaseException:  # an interrupt: not waited for
                child.kill()
                raise
        if child.returncode:
            raise RuntimeError(f"a process that repeats the step ended with status {child.returncode}")


def losses(training: Training, arm: str, steps: int) -> list[float]:
    """The loss of each of `steps` steps from the initial weights."""
    training.use(arm)
    training.restart()
    return [float(training.step()) for _ in range(steps)]


@dataclass(frozen=True)
class Seen:
    """A tensor at one place of the network: its digest as fp32, and rounded to bf16."""

    dtype: str
    exact: str
    rounded: str

    @classmethod
    def of(cls, tensor: Tensor) -> Seen:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, digest(tensor.float()), digest(tensor.bfloat16()))


Places = dict[str, Seen]
LOSS = "loss"


def trace(training: Training, arm: str) -> tuple[Places, Places]:
    """What every layer gives forward, and what reaches and leaves it backward, in the order of the run."""
    forward: Places = {}
    backward: Places = {}
    handles = []

    def put(places: Places, name: str, tensor: Tensor) -> None:
        calls = sum(place.split(" (call ")[0] == name for place in places)
        places[f"{name} (call {calls + 1})" if calls else name] = Seen.of(tensor)

    def watch(name: str, module: nn.Module) -> None:
        def before(_, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not args[0].requires_grad:
                return None
            own = args[0].view_as(args[0])  # the gradient from this reader alone, before sums
            own.register_hook(lambda gradient: put(backward, f"input of {name}", gradient))
            return (own, *args[1:])

        def after(_, args: tuple[Tensor, ...], output: Tensor) -> None:
            put(forward, f"output of {name}", output)
            output.register_hook(lambda gradient: put(backward, f"output of {name}", gradient))

        handles.extend((module.register_forward_pre_hook(before), module.register_forward_hook(after)))

    for name, module in training.network.named_modules():
        if not list(module.children()) and not isinstance(module, nn.Identity):
            watch(name, module)
    training.use(arm)
    training.restart()
    try:
        forward[LOSS] = Seen.of(training.backward())
    finally:
        for handle in handles:
            handle.remove()
        training.network.zero_grad(set_to_none=True)
    return forward, backward


SUMMED = (
    "the gradients of the layer's readers are summed here: each is the same in both, and the sum is rounded "
    "to the layer's dtype in one and not in the other"
)
TIES = (
    "of equal values the maximum passes its gradient to the first, and values that differ in fp32 can be "
    "equal when rounded to bf16"
)


def why(place: str, first: Seen, second: Seen) -> str:
    """The cause of a difference backward, as far as the bits tell it."""
    if first.dtype == second.dtype:
        return "the same operations gave other bits"
    if first.rounded == second.rounded:
        return SUMMED
    return TIES if place.startswith("input of pool") else "not explained by one rounding"


def difference(training: Training, pair: tuple[str, str]) -> dict:
    """Where the steps of two arms, from the same weights, first differ forward and backward.

    Forward, where the sites of one arm return fp32 and those of the other bf16, layers agree when they have
    the same bits once rounded to bf16: what one keeps in fp32 must be what the other one rounded, at every
    site. The loss, everything backward and arms of one dtype agree when their values are the same.
    """
    one, other = (trace(training, arm) for arm in pair)
    sites = [f"output of {name}" for name, _ in training.sites]
    rounds = one[0][sites[0]].dtype != other[0][sites[0]].dtype

    def agree(place: str) -> bool:
        a, b = one[0][place], other[0][place]
        return a.exact == b.exact or (rounds and place != LOSS and a.rounded == b.rounded)

    forward = [place for place in other[0] if not agree(place)]
    backward = [place for place in other[1] if one[1][place].exact != other[1][place].exact]
    found = {
        "arms": list(pair),
        "sites": len(sites),
        "sites_rounded_once": sum(map(agree, sites)),
        "forward_places": len(other[0]),
        "forward_first": forward[0] if forward else None,
        "backward_places": len(other[1]),
        "backward_different": len(backward),
        "backward_first": backward[0] if backward else None,
        "backward_why": None,
    }
    if backward:
        a, b = one[1][backward[0]], other[1][backward[0]]
        found["backward_dtypes"] = [a.dtype, b.dtype]
        found["backward_why"] = (
            f"forward differs already, at {forward[0]}" if forward else why(backward[0], a, b)
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("device", "scales", "width", "arms"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(arguments)
    for number in options.scales.split(","):
        training = Training(Scale(int(number), int(options.width)), torch.device(options.device))
        for arm in options.arms.split(","):
            with deterministic(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found = one_step(training, arm)
                except Exception as error:
                    found = {"arm": arm, **failure(error)}
            told = {str(w.message).split(" does not have a deterministic")[0] for w in caught
                    if "deterministic implementation" in str(w.message)}  # fmt: skip
            print(json.dumps({"scale": int(number), **found, "not_deterministic": sorted(told)}), flush=True)
        del training
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
