# SPDX-License-Identifier: Apache-2.0
"""Models and comparisons for the tests of conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import steadynorm
from helpers import filled, normal

IMAGE = normal(2, 3, 9, 8)


class OwnForward(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) * 2


def overridden(norm: nn.Module) -> nn.Module:
    norm.forward = lambda x: x
    return norm


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: 2 * output)
    return module


def results(model: nn.Module, call: Callable, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """y and every gradient, zero for a parameter that is not used."""
    x = x.clone().requires_grad_()
    y = call(model, x)
    wanted = {"dx": x} | {name: p for name, p in model.named_parameters() if p.requires_grad}
    dy = normal(*y.shape, seed=3).to(y)
    found = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}


def assert_computes_the_same(
    model: nn.Module, expected: nn.Module, x: torch.Tensor, call: Callable = nn.Module.__call__
) -> None:
    """In float64, y and every gradient.

    Sums have less than 1e5 terms, each rounded by 1.1e-16: 1e-10 leaves ten of them that agree in sign. Whole
    U-Nets measure 3e-13 where values are 100; a missing or doubled activation is off by more than 1e-3.
    """
    model, expected = copy.deepcopy(model).double(), copy.deepcopy(expected).double()
    found = [results(m, call, x.double()) for m in (model, expected)]
    torch.testing.assert_close(*found, atol=1e-10, rtol=1e-10)


def notes(model: nn.Module) -> dict[str, str]:
    return {row.site: row.note for row in steadynorm.report(model).rows}


def network() -> nn.Sequential:
    return filled(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.GroupNorm(4, 8),
            nn.SiLU(),
            nn.Conv2d(8, 6, 3),
            nn.GroupNorm(3, 6),
        )
    )
