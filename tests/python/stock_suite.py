# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own samples and checks for GroupNorm, from the installed torch, with ours in PyTorch's place.

    python -m pytest tests/python/stock_suite.py

Run in a process of its own (test_stock_suite.py does): torch.testing._internal changes the process that
imports it. It ships the samples and the checkers, not the test classes; what those do is written out here.

Differences that are intended:

- a negative eps is refused: stock takes it, and returns NaN where the variance is smaller;
- refused input raises ValueError with our sentence, where stock raises RuntimeError with its own;
- under CUDA autocast the module returns its input's dtype, stock fp32;
- on CUDA y and dx keep channels_last, stock's are contiguous;
- ExpandedWeight, of torch.nn.utils's per-sample gradients, is refused: vmap over grad computes them.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.testing._internal import common_methods_invocations, common_modules, composite_compliance

import steadynorm
from helpers import assert_within_bounds

(OP,) = (op for op in common_methods_invocations.op_db if op.name == "nn.functional.group_norm")
(MODULE,) = (info for info in common_modules.module_db if info.module_cls is torch.nn.GroupNorm)
DTYPES = sorted(OP.dtypes, key=str)
OTHERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)


def call(sample, f=steadynorm.group_norm):
    return f(sample.input, *sample.args, **sample.kwargs)


def served(samples):
    """The samples that ours takes; the others are refused."""
    count = 0
    for sample in samples:
        if sample.kwargs.get("eps", 0) < 0:
            with pytest.raises(ValueError, match=r"^group_norm: eps must be finite and not negative"):
                call(sample)
        else:
            count += 1
            yield sample
    assert count > 10


def tensors_of(sample):
    return [
        t for t in (sample.input, sample.kwargs.get("weight"), sample.kwargs.get("bias")) if t is not None
    ]


# --- the function


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference_in_numpy(dtype):
    for sample in served(OP.reference_inputs("cpu", dtype)):
        wide = sample.transform(lambda t: t.double().numpy() if isinstance(t, torch.Tensor) else t)
        expected = torch.from_numpy(OP.ref(wide.input, *wide.args, **wide.kwargs))
        torch.testing.assert_close(call(sample), expected.to(dtype))


def test_gradients_agree_with_stock():
    for sample in served(OP.reference_inputs("cpu", torch.float64, requires_grad=True)):
        found = []
        for f in (steadynorm.group_norm, F.group_norm):
            y = call(sample, f)
            dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
            found.append((y, *torch.autograd.grad(y, tensors_of(sample), dy)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gradients_are_within_our_bounds(dtype):
    for sample in served(OP.reference_inputs("cpu", dtype)):
        if len(sample.input) > 0:
            dy = torch.linspace(-1, 1, sample.input.numel()).view_as(sample.input).to(dtype)
            assert_within_bounds(sample.input, *sample.args, **sample.kwargs, dy=dy)


def test_takes_stocks_dtypes_and_no_other():
    sample = next(OP.sample_inputs("cpu", torch.float32))
    for dtype in DTYPES:
        assert (
            call(sample.transform(lambda t, d=dtype: t.to(d) if isinstance(t, torch.Tensor) else t)).dtype
            == dtype
        )
    for dtype in OTHERS:
        with pytest.raises(
            ValueError, match=r"^group_norm: input must be float32, bfloat16, float16 or float64"
        ):
            steadynorm.group_norm(sample.input.to(dtype), *sample.args)


def test_refuses_what_stock_refuses():
    count = 0
    for error in OP.error_inputs("cpu"):
        count += 1
        with pytest.raises(error.error_type, match=error.error_regex):
            call(error.sample_input, F.group_norm)
        with pytest.raises(ValueError, match=r"^group_norm: "):
            call(error.sample_input)
    assert count > 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_noncontiguous_samples(dtype):
    for sample in served(OP.sample_inputs("cpu", dtype)):
        other = sample.noncontiguous()
        assert torch.equal(call(other), call(sample))


def test_negative_and_lazily_copied_views():
    for sample in served(OP.sample_inputs("cpu", torch.float32)):
        plain = call(sample)
        negative = copy.copy(sample)
        negative.input = torch._neg_view(-sample.input)
        assert torch.equal(call(negative), plain)
        lazy = sample.transform(lambda t: torch._lazy_clone(t) if isinstance(t, torch.Tensor) else t)
        assert torch.equal(call(lazy), plain)
        assert all(torch._C._is_cow_tensor(t) for t in tensors_of(lazy))


def test_gradcheck_and_gradgradcheck():
    assert OP.supports_forward_ad and OP.supports_fwgrad_bwgrad and OP.supports_gradgrad
    for sample in served(OP.sample_inputs("cpu", torch.float64, requires_grad=True)):
        if sample.input.numel() > 30:
            continue

        def f(*tensors, sample=sample):
            parameters = dict(zip(("weight", "bias"), tensors[1:], strict=False))
            return steadynorm.group_norm(tensors[0], *sample.args, **{**sample.kwargs, **parameters})

        options = {"check_grad_dtypes": True, "check_batched_grad": OP.check_batched_grad}
        assert gradcheck(
            f, tensors_of(sample), check_forward_ad=True, check_batched_forward_grad=True, **options
        )
        options["check_batched_grad"] = OP.check_batched_gradgrad
        assert gradgradcheck(
            f, tensors_of(sample), gen_non_contig_grad_outputs=True, check_fwd_over_rev=True, **options
        )


def test_is_composite_compliant():
    """Tensor subclasses meet no operator that bypasses them, in forward, backward and forward mode."""
    samples = served(OP.sample_inputs("cpu", torch.float32, requires_grad=True))
    for sample in {s.input.shape: s for s in samples}.values():
        for check in (
            composite_compliance.check_with_mode,
            composite_compliance.check_all_permutations,
            composite_compliance.check_backward_formula,
            composite_compliance.check_forward_ad_formula,
        ):
            check(
                steadynorm.group_norm,
                (sample.input, *sample.args),
                sample.kwargs,
                assert_equal_fn=torch.testing.assert_close,
            )


def test_expanded_weights_are_refused():
    norm = steadynorm.GroupNorm(2, 4)
    with pytest.raises(RuntimeError, match="Expanded Weights"):
        call_for_per_sample_grads(norm)(torch.randn(3, 4, 5))


# --- the module


def inputs(dtype=torch.float32, requires_grad=False, training=True):
    found = MODULE.module_inputs_func(
        MODULE, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training
    )
    assert len(found) > 5
    for case in found:
        constructor, forward = case.constructor_input, case.forward_input
        options = {**constructor.kwargs, "device": "cpu", "dtype": dtype}
        ours = steadynorm.GroupNorm(*constructor.args, **options).train(training)
        stock = torch.nn.GroupNorm(*constructor.args, **options).train(training)
        with torch.no_grad():
            for number, parameter in enumerate(stock.parameters()):
                parameter.copy_(torch.linspace(-1, 2 + number, parameter.numel()))
        ours.load_state_dict(stock.state_dict())
        yield ours, stock, forward.args


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("dtype", MODULE.dtypes)
def test_module_agrees_with_stock(dtype, training):
    for ours, stock, arguments in inputs(dtype, training=training):
        assert all(p.dtype == dtype for p in ours.parameters())
        assert repr(ours) == repr(stock)
        wide = copy.deepcopy(stock).double()(*(x.double() for x in arguments))
        torch.testing.assert_close(ours(*arguments), wide.to(dtype))


def test_module_survives_copies_and_dtypes():
    for ours, _, arguments in inputs():
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(other(*arguments), ours(*arguments))
        double = copy.deepcopy(ours).to(torch.float64)
        assert double(*(x.double() for x in arguments)).dtype == torch.float64
        empty = copy.deepcopy(ours).to("meta").to_empty(device="cpu")
        assert empty.state_dict().keys() == ours.state_dict().keys()


def test_module_keeps_memory_formats():
    found = 0
    for ours, _, (x,) in inputs():
        if x.dim() == 4:
            found += 1
            last = ours.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
            assert last.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(last, ours(x))
    assert found > 1


def test_module_gradcheck():
    for ours, _, arguments in inputs(torch.float64, requires_grad=True):
        names = [name for name, _ in ours.named_parameters()]

        def f(x, *parameters, ours=ours, names=names):
            return torch.func.functional_call(ours, dict(zip(names, parameters, strict=True)), (x,))

        if arguments[0].numel() <= 150:
            tensors = (*arguments, *ours.parameters())
            assert gradcheck(f, tensors)
            assert gradgradcheck(f, tensors)


def test_module_errors_are_stocks():
    found = MODULE.module_error_inputs_func(
        MODULE, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    assert found
    for error in found:
        constructor = error.module_error_input.constructor_input
        with pytest.raises(error.error_type, match=error.error_regex):
            steadynorm.GroupNorm(*constructor.args, **constructor.kwargs)
