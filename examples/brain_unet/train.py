#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the brain U-Net in two arms, stock GroupNorm and ours, and report how they compare."""

from __future__ import annotations

import math
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass, field

# The profiler probes for a GPU and complains on machines that have none.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from options import parse_options

# Rounding drives the arms apart, the faster the larger the step: under CUDA autocast, where stock adds up the
# gradients of skip connections in fp32, 8.7e-2 at 1.5e-2 with momentum 0.9, 6.5e-3 at 4e-3 with 0.95.
LEARNING_RATE = 4e-3
MOMENTUM = 0.95
CLIP = 1.0  # largest norm of the gradient
WARM_UP = 0.1  # share of the steps
SKIPPED_TIMES = 5  # first steps, left out of the time statistics: libraries warm up in them


class Interrupt:
    """Turns the first Ctrl-C into a flag that is looked at between steps; the second one kills."""

    def __init__(self):
        self.set = False
        signal.signal(signal.SIGINT, self.on_signal)

    def on_signal(self, *_):
        self.set = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Not print: the handler may run inside another write to the same stream.
        os.write(2, b"\ninterrupted: writing the report so far (again to give up)\n")


@dataclass
class Arm:
    name: str
    model: object
    optimiser: object
    schedule: object
    census: object
    memory: object
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    dice: dict | None = None
    norm_ms: dict | None = None

    def step(self, images, labels, loss_of, device) -> None:
        """One timed training step."""
        import measure
        import torch

        measure.synchronize(device)
        start = time.perf_counter()
        with self.memory.step():
            loss = self.pass_through(images, labels, loss_of, device)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self.losses.append(loss.item())
            measure.synchronize(device)
        self.step_ms.append((time.perf_counter() - start) * 1e3)
        self.schedule.step()

    def pass_through(self, images, labels, loss_of, device):
        """Forward and backward; the gradients stay in the parameters."""
        import torch

        with torch.autocast(device.type, torch.bfloat16):
            scores = self.model(images)
        loss = loss_of(scores.float(), labels)
        loss.backward()
        return loss


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine down to 2 %."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def make_loss():
    """Cross entropy, plus 1 - soft Dice of grey and white matter."""
    import torch.nn.functional as F

    def loss(scores, truth):
        entropy = F.cross_entropy(scores, truth)
        p = scores.softmax(1)[:, 1:]
        t = F.one_hot(truth, 3).movedim(-1, 1)[:, 1:]
        over = (0, 2, 3, 4)
        # With hardly any tissue in the batch a small constant here makes a gradient that throws
        # the weights about, and with them the two arms apart; 1 % of the voxels does not.
        soft = 0.01 * truth.numel()
        dice = (2 * (p * t).sum(over) + soft) / (p.sum(over) + t.sum(over) + soft)
        return entropy + 1 - dice.mean()

    return loss


def make_arms(options) -> list[Arm]:
    """Both arms, from the same initial weights: ours loads the stock model's state dict."""
    import measure
    import model as unet
    import torch

    import steadynorm

    torch.manual_seed(options.seed)
    arms, state = [], None
    for name, norm in (("stock", unet.stock_norm), ("steadynorm", unet.steady_norm)):
        net = unet.UNet(options.width, options.depth, norm)
        state = state or {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(state)
        net = net.to(options.device, memory_format=torch.channels_last_3d)
        optimiser = torch.optim.SGD(
            net.parameters(), LEARNING_RATE, momentum=MOMENTUM, nesterov=True, weight_decay=1e-4
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: learning_rate_factor(step, options.steps)
        )
        census = measure.Census(unet.norm_sites(net), steadynorm.last_rung if name == "steadynorm" else None)
        memory = measure.PeakMemory(options.device)
        arms.append(Arm(name, net, optimiser, schedule, census, memory))
    return arms


def interval() -> float:
    """Seconds between two pictures of a progress bar; a log file gets few of them."""
    return 0.2 if sys.stderr.isatty() else 15.0


def train(options, brain, arms: list[Arm], interrupt: Interrupt) -> None:
    import data
    import model as unet
    from tqdm import tqdm

    device = options.device
    patches = data.Patches(brain, options.size, options.batch, options.seed)
    loss_of = make_loss()
    with tqdm(range(options.steps), "train", unit="step", mininterval=interval()) as bar:
        for step in bar:
            images, labels = patches.next()
            images, labels = unet.channels_last_input(images.to(device)), labels.to(device)
            # Who goes first alternates, so that neither arm always meets the other's cache.
            for arm in arms if step % 2 == 0 else arms[::-1]:
                arm.step(images, labels, loss_of, device)
            bar.set_postfix({arm.name: f"{arm.losses[-1]:.4f}" for arm in arms}, refresh=False)
            if interrupt.set:
                return


def predict(options, brain, arm: Arm, interrupt: Interrupt):
    """Classes `uint8[X, Y, Z]` of the validation part, or None if interrupted.

    Windows of the training size overlap by a half; their probabilities are averaged with
    weights that fall towards the window's border, where the zero padding is near. Windows of
    pure air are left out, as they are in training: their class is "other".
    """
    import data
    import model as unet
    import numpy as np
    import torch
    from tqdm import tqdm

    size, device = options.size, options.device
    batch = max(options.batch, 2**16 // size**3)
    image = brain.windowed(brain.valid.t1)
    shape = brain.valid.t1.shape
    ramp = 1 - (torch.arange(size) + 0.5 - size / 2).abs() / (size / 2) + 1e-3
    weight = ramp[:, None, None] * ramp[:, None] * ramp
    total = torch.zeros(3, *shape)
    total[0] = 1e-6  # where no window comes
    starts = [data.window_starts(n, size, size // 2) for n in shape]
    cubes = [
        tuple(slice(s, s + size) for s in (a, b, c)) for a in starts[0] for b in starts[1] for c in starts[2]
    ]
    cubes = [cube for cube in cubes if brain.valid.t1[cube].any()]
    with torch.no_grad():
        for i in tqdm(range(0, len(cubes), batch), f"validate {arm.name}", mininterval=interval()):
            some = cubes[i : i + batch]
            x = unet.channels_last_input(torch.stack([image[c] for c in some]).to(device))
            with torch.autocast(device.type, torch.bfloat16):
                scores = arm.model(x)
            for cube, p in zip(some, scores.float().softmax(1).cpu(), strict=True):
                total[(slice(None), *cube)] += p * weight
            if interrupt.set:
                return None
    return total.argmax(0).numpy().astype(np.uint8)


def examine(options, brain, arms: list[Arm], interrupt: Interrupt) -> dict:
    """Everything after training: Dice of both arms, time of every GroupNorm site, peak memory.
    Returns the predicted classes by arm; where an interrupt comes, what is left stays None."""
    import data
    import measure
    import model as unet

    device, predicted = options.device, {}
    for arm in arms:
        if interrupt.set:
            return predicted
        predicted[arm.name] = predict(options, brain, arm, interrupt)
        if predicted[arm.name] is not None:
            arm.dice = data.dice_scores(predicted[arm.name], brain.valid.labels)
    for arm in arms:
        arm.census.close()
    if interrupt.set:
        return predicted
    for arm in arms:
        arm.norm_ms = measure.norm_ms(arm.model, arm.census, device)
    patches = data.Patches(brain, options.size, options.batch, options.seed)
    loss_of = make_loss()
    images, labels = patches.next()
    images, labels = unet.channels_last_input(images.to(device)), labels.to(device)
    for arm in arms:
        if not interrupt.set:
            arm.memory.trace(lambda arm=arm: arm.pass_through(images, labels, loss_of, device))
    return predicted


def summarise(options, brain, arms: list[Arm], baseline: dict, interrupted: bool) -> dict:
    """The content of report.json."""
    import measure
    import model as unet
    import torch

    import steadynorm

    stock, ours = arms
    steps = len(ours.losses)
    result = {
        "device": str(options.device),
        "device_name": device_name(options.device),
        "steps": steps,
        "interrupted": interrupted,
        "baseline_dice": baseline["mean"],
        "baseline": baseline,
        "beats_baseline": ours.dice["mean"] > baseline["mean"] if ours.dice else None,
        "max_rel_loss_gap": measure.max_relative_gap(stock.losses, ours.losses),
        "arms": {},
    }
    for arm in arms:
        skipped = min(SKIPPED_TIMES, len(arm.step_ms) // 2)
        times = measure.spread(arm.step_ms[skipped:])
        norm = sum(arm.norm_ms.values()) if arm.norm_ms else None
        result["arms"][arm.name] = {
            "loss_first": arm.losses[0] if arm.losses else None,
            "loss_last": measure.running_mean(arm.losses)[-1] if arm.losses else None,
            "dice": arm.dice["mean"] if arm.dice else None,
            "dice_grey": arm.dice["grey"] if arm.dice else None,
            "dice_white": arm.dice["white"] if arm.dice else None,
            "step_ms_median": times["median"] if times else None,
            "step_ms_q1": times["q1"] if times else None,
            "step_ms_q3": times["q3"] if times else None,
            "peak_mib": arm.memory.peak_mib,
            "norm_ms": norm,
            "rest_ms": measure.rest_ms(times, norm),
            "norm_ms_by_site": arm.norm_ms,
            "losses": arm.losses,
            "step_ms": arm.step_ms,
        }
    result["sites"] = ours.census.rows()
    result["stock_sites"] = stock.census.rows()
    want = {"out_dtype": "bfloat16", "memory_format": "channels_last_3d", "rung": "native"}
    result["sites_off_target"] = [
        row["name"] for row in result["sites"] if any(row[k] != v for k, v in want.items())
    ]
    result["split"] = {
        "axis": "back to front",
        "train": [brain.train.start, brain.train.stop],
        "valid": [brain.valid.start, brain.valid.stop],
        "gap": brain.gap,
        "receptive_field": unet.receptive_field(options.depth),
    }
    keys = ("steps", "width", "depth", "size", "batch", "seed")
    result["seed"] = options.seed
    result["options"] = {k: getattr(options, k) for k in keys} | {
        "learning_rate": LEARNING_RATE,
        "momentum": MOMENTUM,
    }
    result["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steadynorm": steadynorm.__version__,
        "threads": torch.get_num_threads(),
    }
    return result


def device_name(device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        import data
        import model as unet
        import report

        import steadynorm  # noqa: F401
    except ModuleNotFoundError as e:
        print(
            f"brain_unet: the Python package {e.name} is missing; `make demo` installs it",
            file=sys.stderr,
        )
        return 2
    print(data.SOURCE)
    try:
        brain = data.load_brain(options.size, unet.receptive_field(options.depth))
    except (data.DataError, ValueError) as e:
        print(f"brain_unet: {e}", file=sys.stderr)
        return 2
    by_threshold = data.threshold_classes(brain.valid.t1, brain.thresholds)
    baseline = data.dice_scores(by_threshold, brain.valid.labels)
    arms = make_arms(options)
    interrupt = Interrupt()
    print(report.headline(options, brain, device_name(options.device), arms[0].model), flush=True)

    train(options, brain, arms, interrupt)
    predicted = examine(options, brain, arms, interrupt)
    result = summarise(options, brain, arms, baseline, interrupt.set)
    result["baseline"]["thresholds"] = list(brain.thresholds)
    report.write_json(result, options.out)
    print(report.table(result))
    report.write_pictures(result, brain, predicted.get("steadynorm"), options.out)
    pictures = ", ".join(sorted(path.name for path in options.out.glob("*.png"))) or "no picture"
    print(f"wrote {options.out}: report.json, report.html, {pictures}")
    return 130 if interrupt.set else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("brain_unet: interrupted before training; no report written", file=sys.stderr)
        sys.exit(130)
