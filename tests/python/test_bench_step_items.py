# SPDX-License-Identifier: Apache-2.0
"""A step's device time by rows: each rule on a kernel's chain of operators, and the chains from a trace."""

from __future__ import annotations

import pytest

from steadynorm.bench.step_items import GROUP_NORM_ROWS, ROWS, Kernel, Op, Shapes, itemise, kernels_of, row_of

SITE, JOINED, WEIGHT, SCORES = (1, 64, 8, 8, 8), (1, 128, 8, 8, 8), (64, 64, 3, 3, 3), (1, 3, 8, 8, 8)
SHAPES = Shapes(frozenset({SITE, JOINED}), frozenset({WEIGHT}))
LAST, FIRST = (
    (64 * 512, 1, 64 * 64, 64 * 8, 64),
    (64 * 512, 512, 64, 8, 1),
)  # strides: channels last, contiguous
SLICE = (128 * 512, 1, 128 * 64, 128 * 8, 128)  # the first 64 of 128 channels last
AT = Op("group_norm site down.0.norm0")
CONV = (Op("aten::conv3d"), Op("aten::convolution"), Op("aten::cudnn_convolution"))
OURS = "torch::autograd::CppNode<steadynorm::binding::(anonymous namespace)::GroupNormFunction>"


def copy(dims=SITE, types=("float", "float"), source=FIRST) -> Op:
    return Op("aten::copy_", (*types, "Scalar"), (dims, dims, ()), (LAST, source, ()))


def node(name: str) -> tuple[Op, Op]:
    return Op(f"autograd::engine::evaluate_function: {name}"), Op(name)


TO_BF16, TO_FP32 = ("c10::BFloat16", "float"), ("float", "c10::BFloat16")
CHAINS = [
    # Forward at a site: stock's cast of its input, its copies of the layout, its own kernels.
    ("dtype conversions", "elementwise", (AT, Op("aten::group_norm"), copy(types=TO_FP32))),
    ("layout copies", "elementwise", (AT, Op("aten::group_norm"), Op("aten::contiguous"), copy())),
    ("GroupNorm forward", "RowwiseMoments", (AT, Op("aten::group_norm"), Op("aten::native_group_norm"))),
    ("GroupNorm forward", "clamp", (AT, Op("aten::relu_"))),
    ("GroupNorm forward", "triton_red_fused", (AT,)),
    ("GroupNorm forward", "Memset", (AT, Op("steadynorm::group_norm_forward"))),
    # Of a reader.
    ("dtype conversions", "elementwise", (CONV[0], Op("aten::to"), copy(types=TO_BF16))),
    ("dtype conversions", "elementwise", (Op("aten::cat"), Op("aten::to"), copy(types=TO_FP32))),
    ("dtype conversions", "elementwise", (*CONV, copy(dims=JOINED, types=TO_BF16))),
    ("layout copies", "elementwise", (*CONV, Op("aten::contiguous"), copy())),
    ("parameters' conversions", "elementwise", (CONV[0], Op("aten::to"), copy(dims=WEIGHT, types=TO_BF16))),
    ("input, scores and loss", "elementwise", (CONV[0], copy(dims=(1, 1, 8, 8, 8), types=TO_BF16))),
    ("layout transforms in cuDNN", "void cudnn::ops::nchwToNhwcKernel<bf16>", CONV),
    ("convolutions", "sm90_xmma_fprop_implicit_gemm_bf16_nhwckrsc_nhwc", CONV),
    ("pooling", "max_pool3d", (Op("aten::max_pool3d"), Op("aten::max_pool3d_with_indices"))),
    ("pooling", "elementwise", (Op("aten::max_pool3d"), copy())),
    ("concatenation", "CatArrayBatchedCopy", (Op("aten::cat"),)),
    ("input, scores and loss", "softmax", (Op("loss"), Op("aten::log_softmax"))),
    ("input, scores and loss", "elementwise", (Op("loss"), copy(dims=SCORES, types=TO_FP32))),
    ("input, scores and loss", "add", (Op("aten::add"),)),
    # Backward.
    ("GroupNorm backward", "ComputeInternalGradients", node("NativeGroupNormBackward0")),
    ("GroupNorm backward", "threshold", (*node("ReluBackward0"), Op("aten::threshold_backward"))),
    ("GroupNorm backward", "triton_red_fused", node("CompiledFunctionBackward")),
    ("GroupNorm backward", "rows", (*node(OURS), Op("steadynorm::group_norm_backward"))),
    ("layout copies", "elementwise", (*node(OURS), copy())),
    ("dtype conversions", "elementwise", (*node("ToCopyBackward0"), copy(types=TO_FP32))),
    ("parameters' conversions", "elementwise", (*node("ToCopyBackward0"), copy(dims=WEIGHT, types=TO_FP32))),
    ("input, scores and loss", "elementwise", (*node("ToCopyBackward0"), copy(dims=SCORES, types=TO_BF16))),
    ("convolutions", "sm90_xmma_wgrad", (*node("ConvolutionBackward0"), Op("aten::convolution_backward"))),
    ("layout copies", "elementwise", (*node("ConvolutionBackward0"), copy())),
    ("concatenation", "elementwise", (*node("ConvolutionBackward0"), copy(source=SLICE))),
    ("dtype conversions", "elementwise", (*node("ToCopyBackward0"), copy(types=TO_FP32, source=SLICE))),
    ("pooling", "max_pool3d_backward", node("MaxPool3DWithIndicesBackward0")),
    ("sums of gradients", "add", (node("MaxPool3DWithIndicesBackward0")[0], Op("aten::add"))),
    ("sums of gradients", "add", (node(OURS)[0], Op("aten::add_"))),
    ("input, scores and loss", "nll", node("NllLoss2DBackward0")),
    ("optimiser", "multi_tensor_apply", (Op("Optimizer.step#SGD.step"), Op("aten::_foreach_add_"))),
    # Nothing is guessed.
    ("unclaimed", "kernel", ()),
    ("unclaimed", "kernel", (Op("aten::mul"),)),
    ("unclaimed", "kernel", (node(OURS)[0],)),
]


@pytest.mark.parametrize(("row", "name", "chain"), CHAINS, ids=range(len(CHAINS)))
def test_a_kernel_goes_to_the_row_of_what_launched_it(row: str, name: str, chain: tuple[Op, ...]) -> None:
    assert row_of(Kernel(name, 1.0, chain), SHAPES) == row


def test_every_row_is_reached() -> None:
    assert {row for row, _, _ in CHAINS} == set(ROWS)


def test_the_rows_add_up_and_what_is_unclaimed_is_named_largest_first() -> None:
    kernels = [Kernel(name, float(i), chain) for i, (_, name, chain) in enumerate(CHAINS)]
    kernels += [Kernel(f"other{i}", 100.0 + i, ()) for i in range(9)]
    found = itemise(kernels, SHAPES)
    assert sum(found["rows_us"].values()) == found["total_us"] == sum(kernel.us for kernel in kernels)
    caused = sum(kernel.us for kernel, of in zip(kernels, CHAINS, strict=False) if of[0] in GROUP_NORM_ROWS)
    assert found["group_norm_share"] == round(caused / found["total_us"], 4)
    assert found["unclaimed"] == [[f"other{i} in no operator", 100.0 + i] for i in (8, 7, 6, 5, 4)]
    assert itemise([], SHAPES)["group_norm_share"] is None


def event(cat: str, name: str, start: float, duration: float, thread: int = 1, **args) -> dict:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": 1,
        "tid": thread,
        "args": args,
    }


def trace() -> list[dict]:
    """A convolution with a cast in it, its backward on another thread, and a copy that no launch tells of."""
    return [
        {"ph": "M", "name": "process_name", "args": {}},
        event("user_annotation", "group_norm site a", 0, 100),
        event("cpu_op", "aten::group_norm", 10, 80, **{"External id": 1}),
        event("cpu_op", "aten::copy_", 20, 10, **{
            "External id": 2, "Input type": ["float", "c10::BFloat16", "Scalar"],
            "Input Dims": [list(SITE), list(SITE), []], "Input Strides": [list(LAST), list(LAST), []],
        }),
        event("cuda_runtime", "cudaLaunchKernel", 25, 2, correlation=7),
        event("cuda_driver", "cuLaunchKernelEx", 50, 2, correlation=8),
        event("cpu_op", node("ReluBackward0")[0].name, 60, 30, 2, **{"External id": 3}),
        event("cpu_op", "ReluBackward0", 65, 20, 2, **{"External id": 4}),
        event("cuda_runtime", "cudaLaunchKernel", 70, 2, 2, correlation=9),
        event("kernel", "cast", 900, 3.0, 70, correlation=7),
        event("kernel", "norm", 910, 5.0, 70, correlation=8),
        event("kernel", "threshold", 920, 7.0, 70, correlation=9),
        event("gpu_memcpy", "Memcpy DtoD", 930, 11.0, 70, **{"correlation": 99, "External id": 2}),
        event("gpu_memset", "Memset", 940, 13.0, 70, correlation=98),
        event("gpu_user_annotation", "group_norm site a", 900, 20.0, 70),
    ]  # fmt: skip


def test_a_launch_is_within_what_is_open_on_its_own_thread() -> None:
    kernels = kernels_of(trace())
    chains = {kernel.name: [op.name for op in kernel.chain] for kernel in kernels}
    assert chains == {
        "cast": ["group_norm site a", "aten::group_norm", "aten::copy_"],
        "norm": ["group_norm site a", "aten::group_norm"],
        "threshold": ["autograd::engine::evaluate_function: ReluBackward0", "ReluBackward0"],
        "Memcpy DtoD": ["group_norm site a", "aten::group_norm", "aten::copy_"],
        "Memset": [],
    }
    found = itemise(kernels, SHAPES)
    assert found["total_us"] == 39.0
    shown = {row: us for row, us in found["rows_us"].items() if us}
    assert shown == {
        "GroupNorm forward": 5.0, "GroupNorm backward": 7.0, "dtype conversions": 14.0, "unclaimed": 13.0,
    }  # fmt: skip


def test_without_a_device_an_operator_has_the_time_that_is_its_own() -> None:
    host = [event for event in trace() if event.get("tid") in (1, 2)]
    own = {kernel.name: kernel.us for kernel in kernels_of(host)}
    assert own["aten::copy_"] == 10 and own["aten::group_norm"] == 70 and own["group_norm site a"] == 20
    assert own["ReluBackward0"] == 20 and sum(own.values()) == 130
