# SPDX-License-Identifier: Apache-2.0
"""Weight and bias with a row for each sample: adaptive normalisation, and vmap over parameters."""

import pytest
import torch
import torch.nn.functional as F

from helpers import ACTIVATIONS, normal
from steadynorm import GroupNorm, group_norm

G, N, C = 3, 2, 6
# In float64, sums of under 100 terms of about 1: 1e-12 is far above every rounding.
EXACT = {"atol": 1e-12, "rtol": 1e-12}


def leaves(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x [N, C, 4, 5], weight and bias [C], scale and shift [N, C]."""
    shapes = ((N, C, 4, 5), (C,), (C,), (N, C), (N, C))
    return [normal(*s, seed=n, dtype=dtype).requires_grad_() for n, s in enumerate(shapes)]


def gradients(function, tensors):
    y = function(*tensors)
    return [y, *torch.autograd.grad(y, tensors, normal(*y.shape, seed=9).to(y))]


@pytest.mark.parametrize("activation", ["none", "silu", "gelu_tanh"])
def test_scale_and_shift_are_parameters_of_a_sample(rung, activation):
    def recipe(x, weight, bias, scale, shift):
        return group_norm(x, G, weight * (1 + scale), bias * (1 + scale) + shift, activation=activation)

    def stock(x, weight, bias, scale, shift):
        y = F.group_norm(x, G, weight, bias)
        y = y * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        return ACTIVATIONS[activation](y)

    for ours, right in zip(gradients(recipe, leaves()), gradients(stock, leaves()), strict=True):
        torch.testing.assert_close(ours, right, **EXACT)


def test_scale_and_shift_keep_their_dtype_in_backward(rung):
    x, _, _, scale, shift = leaves(torch.bfloat16)
    y = group_norm(x, G, 1 + scale.float(), shift, activation="silu")
    y.sum().backward()
    assert {t.dtype for t in (y, x.grad, scale.grad, shift.grad)} == {torch.bfloat16}
    assert torch.count_nonzero(scale.grad) == N * C


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_vmap_over_weights_is_a_row_for_each_sample(rung, activation):
    def one(x, weight, bias):
        return group_norm(x[None], G, weight, bias, activation=activation)[0]

    def rows(x, weight, bias):
        return group_norm(x, G, weight, bias, activation=activation)

    x, _, _, weight, bias = leaves()
    pairs = zip(
        gradients(torch.vmap(one), [x, weight, bias]), gradients(rows, [x, weight, bias]), strict=True
    )
    for ours, right in pairs:
        torch.testing.assert_close(ours, right, **EXACT)


def test_vmap_over_the_weights_of_an_ensemble(rung):
    x, _, _, weight, bias = (t.detach() for t in leaves())
    norm = GroupNorm(G, C, dtype=torch.float64, activation="silu")

    def member(parameters):
        return torch.func.functional_call(norm, parameters, (x,))

    y = torch.vmap(member)({"weight": weight, "bias": bias})
    right = torch.stack(
        [group_norm(x, G, w, b, activation="silu") for w, b in zip(weight, bias, strict=True)]
    )
    torch.testing.assert_close(y, right, **EXACT)


def test_gradients_of_each_samples_weight_by_vmap(rung):
    x, _, _, weight, _ = leaves()

    def loss(weight, x):
        return group_norm(x[None], G, weight, activation="silu").square().sum()

    got = torch.vmap(torch.func.grad(loss))(weight.detach(), x.detach())
    right = torch.autograd.grad(group_norm(x, G, weight, activation="silu").square().sum(), weight)[0]
    torch.testing.assert_close(got, right, **EXACT)
