# SPDX-License-Identifier: Apache-2.0
"""What the bits of a result may depend on (docs/numerics.md), by memcmp through the public entry."""

import hashlib
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from bits import as_bits, assert_same_bits
from calls import GRADIENTS, LAYOUTS, assert_all_same_bits, memory_format, normal, parameters, step

import steadynorm

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Small enough for one block, many leaves, ragged, and a volume.
SHAPES = [((16, 9, 31), 8), ((24, 130, 131), 4), ((6, 517, 516), 2), ((64, 20, 33, 34), 8), ((512, 6, 7), 32)]


def operands(shape, samples, layout, dtype=BF16):
    """Values that bf16 holds exactly, in any dtype."""
    x, dy = (normal(samples, *shape, seed=i, dtype=BF16, layout=layout).to(dtype) for i in range(2))
    return x, dy, *(p.to(BF16).float() for p in parameters(shape[0]))


@pytest.fixture(params=product(SHAPES, LAYOUTS), ids=lambda p: f"{'x'.join(map(str, p[0][0]))}-{p[1]}")
def problem(request):
    (shape, groups), layout = request.param
    return shape, groups, layout


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_repeated_runs(problem, activation):
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 3, layout)
    expected = step(x, groups, weight, bias, dy=dy, activation=activation)
    for run in range(20):
        found = step(x, groups, weight, bias, dy=dy, activation=activation)
        assert_all_same_bits(found, expected, f"run {run}")


@pytest.mark.parametrize("samples", [2, 5, 16])
def test_a_sample_alone_and_at_every_place_of_a_batch(problem, samples):
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, samples, layout)
    batch = step(x, groups, weight, bias, dy=dy, activation="silu")
    rows = [p.expand(samples, -1).contiguous() for p in (weight, bias)]
    batch_rows = step(x, groups, *rows, dy=dy, activation="silu")
    for n in range(samples):
        at = slice(n, n + 1)
        alone = step(x[at], groups, weight, bias, dy=dy[at], activation="silu")
        for name in ("y", "dx"):
            assert_same_bits(alone[name], batch[name][at], f"{name} of sample {n} of {samples}")
        for name in ("dweight", "dbias"):
            assert_same_bits(alone[name], batch_rows[name][n], f"{name} of sample {n} of {samples}")


def test_the_same_sample_at_every_place(problem):
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 1, layout)
    alone = step(x, groups, weight, bias, dy=dy)
    other, other_dy, *_ = operands(shape, 5, layout)
    for n in range(5):
        batch, batch_dy = other.clone(), other_dy.clone()
        batch[n], batch_dy[n] = x[0], dy[0]
        found = step(batch, groups, weight, bias, dy=batch_dy)
        for name in ("y", "dx"):
            assert_same_bits(found[name][n : n + 1], alone[name], f"{name} at place {n}")


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_storage_dtypes_of_the_same_values(problem, activation):
    """x, dy, weight and bias as bf16 or as fp32: equal before a store's rounding."""
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 3, layout, FP32)
    expected = step(x, groups, weight, bias, dy=dy, activation=activation)
    for x_dtype, dy_dtype in product((FP32, BF16), repeat=2):
        found = step(
            x.to(x_dtype), groups, weight, bias, dy=dy.to(dy_dtype), activation=activation, out_dtype=dy_dtype
        )
        what = f"x {x_dtype}, dy {dy_dtype}"
        assert_same_bits(found["y"], expected["y"].to(dy_dtype), f"{what}: y")
        assert_same_bits(found["dx"], expected["dx"].to(x_dtype), f"{what}: dx")
        assert_same_bits(found["dweight"], expected["dweight"], f"{what}: dweight")
        assert_same_bits(found["dbias"], expected["dbias"], f"{what}: dbias")
    for w_dtype, b_dtype in product((FP32, BF16), repeat=2):
        found = step(x, groups, weight.to(w_dtype), bias.to(b_dtype), dy=dy, activation=activation)
        what = f"weight {w_dtype}, bias {b_dtype}"
        assert_same_bits(found["y"], expected["y"], f"{what}: y")
        assert_same_bits(found["dx"], expected["dx"], f"{what}: dx")
        assert_same_bits(found["dweight"], expected["dweight"].to(w_dtype), f"{what}: dweight")
        assert_same_bits(found["dbias"], expected["dbias"].to(b_dtype), f"{what}: dbias")


def test_statistics_of_the_same_values(problem):
    shape, groups, layout = problem
    x, *_ = operands(shape, 3, layout, FP32)
    operators = torch.ops.steadynorm
    width = shape[0] // groups
    expected = operators.group_norm_forward(x, None, None, width)[1]
    moments = operators.group_norm_stats(x, width)
    assert_same_bits(operators.group_norm_forward(x.to(BF16), None, None, width)[1], expected, "statistics")
    assert_same_bits(operators.group_norm_stats(x.to(BF16), width), moments, "moments")
    assert_same_bits(operators.group_norm_stats(x[1:2], width), moments[1:2], "moments of one sample")
    shard = x[:, :width].contiguous(memory_format=memory_format(layout, x.dim()))
    parts = operators.group_norm_stats(shard, width)
    assert_same_bits(parts, moments[:, :1], "moments of one group's channels")


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_apply_of_stats_is_forward(problem, dtype):
    shape, groups, layout = problem
    x, _, weight, bias = operands(shape, 3, layout, dtype)
    operators, width = torch.ops.steadynorm, shape[0] // groups
    expected = operators.group_norm_forward(x, weight, bias, width, 1e-5, "silu")[0]
    moments = operators.group_norm_stats(x, width)
    found = operators.group_norm_apply(x, moments, weight, bias, width, 1e-5, "silu")
    assert_same_bits(found, expected, "apply of stats")


@pytest.mark.parametrize("out_dtype", [BF16, FP16])
def test_a_narrow_output_is_the_fp32_one_rounded_once(problem, out_dtype):
    shape, groups, layout = problem
    x, _, weight, bias = operands(shape, 2, layout, FP32)
    wide = step(x, groups, weight, bias, activation="silu", out_dtype=FP32)["y"]
    narrow = step(x, groups, weight, bias, activation="silu", out_dtype=out_dtype)["y"]
    assert_same_bits(narrow, wide.to(out_dtype), f"{out_dtype}")


def test_fused_relu_is_relu_of_the_unfused(problem):
    shape, groups, layout = problem
    x, _, weight, bias = operands(shape, 2, layout)
    fused = step(x, groups, weight, bias, activation="relu")["y"]
    assert_same_bits(fused, step(x, groups, weight, bias)["y"].relu(), "relu")


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_any_subset_of_wanted_gradients(problem, activation):
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 3, layout)
    expected = step(x, groups, weight, bias, dy=dy, activation=activation)
    for mask in range(1, 8):
        wanted = [name for i, name in enumerate(GRADIENTS) if mask >> i & 1]
        found = step(x, groups, weight, bias, dy=dy, wanted=wanted, activation=activation)
        assert set(found) == {"y", *wanted}
        assert_all_same_bits(found, {name: expected[name] for name in found}, f"only {wanted}")


def test_one_row_and_equal_rows_of_parameters(problem):
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 3, layout)
    expected = step(x, groups, weight, bias, dy=dy, activation="silu")
    for w, b in product((weight, weight.expand(3, -1).contiguous()), (bias, bias.expand(3, -1).contiguous())):
        found = step(x, groups, w, b, dy=dy, activation="silu")
        for name in ("y", "dx"):
            assert_same_bits(found[name], expected[name], f"{name}, weight {w.dim()}-d, bias {b.dim()}-d")


def test_missing_parameters_are_1_and_0(problem):
    shape, groups, layout = problem
    x, dy, *_ = operands(shape, 2, layout)
    one, zero = torch.ones(shape[0], device="cuda"), torch.zeros(shape[0], device="cuda")
    expected = step(x, groups, one, zero, dy=dy)
    found = step(x, groups, dy=dy)
    assert_all_same_bits(found, {name: expected[name] for name in found}, "no parameters")


def test_samples_are_summed_in_fixed_blocks():
    """dweight and dbias of 40 samples: blocks of 32, in order, each from 0, in double; rows as fp32."""
    x, dy = normal(40, 8, 11, 13), normal(40, 8, 11, 13, seed=1)
    weight, bias = parameters(8)
    found = step(x, 2, weight, bias, dy=dy)
    rows = step(x, 2, weight.expand(40, -1).contiguous(), bias.expand(40, -1).contiguous(), dy=dy)
    for name in ("dweight", "dbias"):
        total = torch.zeros(8, dtype=torch.float64, device="cuda")
        for start in (0, 32):
            block = torch.zeros_like(total)
            for row in rows[name][start : start + 32].double():
                block += row
            total += block
        assert_same_bits(found[name], total.float(), name)


def test_two_streams_at_once(problem):
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 8, layout)
    expected = step(x, groups, weight, bias, dy=dy, activation="silu")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(step(x, groups, weight, bias, dy=dy, activation="silu"))
    torch.cuda.synchronize()
    for i, outputs in enumerate(found):
        assert_all_same_bits(outputs, expected, f"stream {i % 2}, run {i // 2}")


def test_cooperative_launches():
    x, dy, weight, bias = operands((640, 64, 64), 2, "channels_last")
    expected = step(x, 32, weight, bias, dy=dy, activation="silu")
    steadynorm.set_cooperative(True)
    try:
        found = step(x, 32, weight, bias, dy=dy, activation="silu")
    finally:
        steadynorm.set_cooperative(False)
    assert_all_same_bits(found, expected, "cooperative")


def digest() -> str:
    """A hash of all outputs of two calls, for a comparison between processes."""
    hashed = hashlib.sha256()
    for layout in LAYOUTS:
        x, dy, weight, bias = operands((64, 20, 33, 34), 3, layout)
        for _, tensor in sorted(step(x, 8, weight, bias, dy=dy, activation="silu").items()):
            hashed.update(as_bits(tensor).cpu().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def test_a_fresh_process():
    here = Path(__file__).resolve().parent
    program = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent / 'support')!r}]\n"
    program += "import test_gpu_bits; print(test_gpu_bits.digest())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == digest()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_gpu_equals_cpu_where_no_approximate_instruction_is_used(problem, activation, dtype):
    """Not promised to users; docs/numerics.md pins the arithmetic of these two on both."""
    shape, groups, layout = problem
    x, dy, weight, bias = operands(shape, 2, layout, dtype)
    on_gpu = step(x, groups, weight, bias, dy=dy, activation=activation)
    form = memory_format(layout, x.dim())
    x, dy = (t.cpu().contiguous(memory_format=form) for t in (x, dy))
    on_cpu = step(x, groups, weight.cpu(), bias.cpu(), dy=dy, activation=activation)
    assert_all_same_bits({name: t.cpu() for name, t in on_gpu.items()}, on_cpu, f"{activation} {dtype}")
