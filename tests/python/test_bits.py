# SPDX-License-Identifier: Apache-2.0
"""What the bits depend on, through the public entry, by memory comparison: y, dx, dweight, dbias."""

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steadynorm
from helpers import OUTPUTS, assert_all_same_bits, assert_same_bits, laid_out, normal, outputs

pytestmark = pytest.mark.usefixtures("native")

# (shape, groups, layout, activation): leaves of whole channels and of parts of one, ragged tails, odd D.
CASES = [
    ((3, 24, 6, 5, 7), 8, "contiguous", "silu"),
    ((3, 24, 6, 5, 7), 8, "channels_last", "silu"),
    ((2, 6, 70, 61), 2, "contiguous", "none"),
    ((2, 6, 70, 61), 2, "channels_last", "none"),
    ((3, 30, 11, 13), 6, "contiguous", "gelu"),
    ((3, 30, 11, 13), 6, "channels_last", "gelu_tanh"),
    ((2, 8, 18, 20, 17), 1, "channels_last", "relu"),
    ((2, 8, 18, 20, 17), 8, "contiguous", "relu"),
    ((5, 36), 4, "contiguous", "silu"),
    ((70, 12, 5), 3, "contiguous", "silu"),
    ((2, 300, 9, 8), 1, "channels_last", "silu"),
]
every_case = pytest.mark.parametrize(
    ("shape", "groups", "layout", "activation"),
    CASES,
    ids=[f"{'x'.join(map(str, s))}-G{g}-{layout}-{a}" for s, g, layout, a in CASES],
)


def data(shape, layout, *, per_sample=False):
    """Values that bf16 and fp16 hold, so that they can be stored in any dtype."""
    row = shape[:2] if per_sample else shape[1:2]
    x = normal(*shape, seed=1).bfloat16().float() + 0.5
    values = {
        "x": laid_out(x.bfloat16().float(), layout),
        "dy": laid_out(normal(*shape, seed=2).bfloat16().float(), layout),
        "weight": (1 + normal(*row, seed=3) / 4).bfloat16().float(),
        "bias": (normal(*row, seed=4) / 4).bfloat16().float(),
    }
    # fp16 has fewer exponents: what it would not hold becomes 0 for every storage.
    return {name: torch.where(v.abs() < 2**-10, 0.0, v) for name, v in values.items()}


def run(values, groups, activation, **options):
    return outputs(
        values["x"],
        groups,
        values["weight"],
        values["bias"],
        dy=values["dy"],
        activation=activation,
        **options,
    )


@every_case
def test_repeated_runs(shape, groups, layout, activation):
    values = data(shape, layout)
    expected = run(values, groups, activation)
    for _ in range(3):
        assert_all_same_bits(run(values, groups, activation), expected, "repeated")


@every_case
def test_threads(shape, groups, layout, activation, set_threads):
    values = data(shape, layout)
    set_threads(1)
    expected = run(values, groups, activation)
    for threads in (2, 3):
        set_threads(threads)
        assert_all_same_bits(run(values, groups, activation), expected, f"{threads} threads")


@every_case
def test_whole_batch_and_one_sample_at_a_time(shape, groups, layout, activation):
    values = data(shape, layout, per_sample=True)
    whole = run(values, groups, activation)
    for n in range(shape[0]):
        alone = run({name: v[n : n + 1] for name, v in values.items()}, groups, activation)
        assert_all_same_bits(alone, {name: v[n : n + 1] for name, v in whole.items()}, f"sample {n} alone")


@every_case
def test_place_in_the_batch(shape, groups, layout, activation):
    values = data(shape, layout, per_sample=True)
    whole = run(values, groups, activation)
    order = list(reversed(range(shape[0])))
    turned = run({name: laid(v[order], v) for name, v in values.items()}, groups, activation)
    assert_all_same_bits(turned, {name: v[order] for name, v in whole.items()}, "reversed batch")


def laid(v: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return laid_out(v, "contiguous" if like.is_contiguous() else "channels_last")


@every_case
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", ["x", "dy", "weight", "bias", "all"])
def test_storage_dtype_of_the_same_values(shape, groups, layout, activation, storage, narrow):
    # [N, C] rows are rounded to fp32 before they are stored, so the fp32 answer, narrowed, is the narrow.
    values = data(shape, layout, per_sample=True)
    expected = run(values, groups, activation, out_dtype=torch.float32)
    names = list(values) if narrow == "all" else [narrow]
    stored = values | {name: values[name].to(storage) for name in names}
    found = run(stored, groups, activation, out_dtype=stored["dy"].dtype)
    kinds = {
        "y": stored["dy"].dtype,
        "dx": stored["x"].dtype,
        "dweight": stored["weight"].dtype,
        "dbias": stored["bias"].dtype,
    }
    narrowed = {name: v.to(kinds[name]) for name, v in expected.items()}
    assert_all_same_bits(found, narrowed, f"{narrow} as {storage}")


@every_case
def test_subset_of_wanted_gradients(shape, groups, layout, activation):
    values = data(shape, layout)
    everything = run(values, groups, activation)
    gradients = OUTPUTS[1:]
    for count in range(3):
        for wanted in itertools.combinations(gradients, count):
            found = run(values, groups, activation, wanted=wanted)
            expected = {name: everything[name] for name in ("y", *wanted)}
            assert_all_same_bits(found, expected, f"wanted {wanted}")


@every_case
def test_one_row_for_all_and_the_same_row_for_each(shape, groups, layout, activation):
    values = data(shape, layout)
    one = run(values, groups, activation)
    rows = {name: values[name].expand(shape[:2]).contiguous() for name in ("weight", "bias")}
    each = run(values | rows, groups, activation)
    for name in ("y", "dx"):
        assert_same_bits(each[name], one[name], f"[N, C]: {name}")
    # Sums over samples: blocks of 32, in order, each from 0 in double; then the blocks.
    for name in ("dweight", "dbias"):
        total = torch.zeros(shape[1], dtype=torch.float64)
        for block in each[name].double().split(32):
            part = torch.zeros(shape[1], dtype=torch.float64)
            for row in block:
                part += row
            total += part
        assert_same_bits(one[name], total.float(), f"[C]: {name}")


@every_case
def test_fused_relu_is_relu_of_the_unfused(shape, groups, layout, activation):
    values = data(shape, layout)
    plain = run(values, groups, "none", wanted=())["y"]
    assert_same_bits(run(values, groups, "relu", wanted=())["y"], plain.relu(), "relu")


@every_case
def test_strides_of_dy(shape, groups, layout, activation):
    values = data(shape, layout)
    expected = run(values, groups, activation)
    others = {
        "contiguous": values["dy"].contiguous(),
        "sliced": torch.cat([values["dy"], values["dy"]], dim=-1)[..., : shape[-1]],
    }
    if len(shape) > 3:
        others["channels_last"] = laid_out(values["dy"], "channels_last")
    for name, dy in others.items():
        assert_all_same_bits(run(values | {"dy": dy}, groups, activation), expected, f"dy {name}")


@every_case
def test_alignment(shape, groups, layout, activation):
    values = data(shape, layout)
    expected = run(values, groups, activation)

    def moved(v):
        storage = torch.empty(v.numel() + 1, dtype=v.dtype)
        return torch.as_strided(storage, v.shape, v.stride(), 1).copy_(v)

    found = run({name: moved(v) for name, v in values.items()}, groups, activation)
    assert_all_same_bits(found, expected, "misaligned")


def digest() -> str:
    total = hashlib.sha256()
    for shape, groups, layout, activation in CASES:
        for tensor in run(data(shape, layout), groups, activation).values():
            total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def test_fresh_process():
    code = "import test_bits; print(test_bits.digest())"
    paths = [str(Path(__file__).parent), str(Path(steadynorm.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == digest()
