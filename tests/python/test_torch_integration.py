# SPDX-License-Identifier: Apache-2.0
"""State dicts, pickles, copies, autograd modes, compile: the module among PyTorch's own."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import steadynorm
from helpers import LAYOUTS, filled, laid_out, layout_of, normal
from steadynorm import MATCH_STOCK_DTYPE, GroupNorm, group_norm


@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_are_exchanged_with_stock(rung, affine):
    stock, ours = filled(nn.GroupNorm(3, 6, affine=affine)), GroupNorm(3, 6, affine=affine, activation="relu")
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())
    x = normal(2, 6, 5)
    torch.testing.assert_close(ours(x), stock(x).relu(), atol=1e-5, rtol=1e-5)
    back = nn.GroupNorm(3, 6, affine=affine)
    back.load_state_dict(filled(ours).state_dict())
    torch.testing.assert_close(ours(x), back(x).relu(), atol=1e-5, rtol=1e-5)


def test_state_dict_survives_a_file(rung):
    norm = filled(GroupNorm(3, 6))
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    other = GroupNorm(3, 6)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.weight, norm.weight)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal(rung, duplicate):
    norm = filled(GroupNorm(3, 6, eps=0.1, activation="gelu"))
    other = duplicate(norm)
    assert repr(other) == repr(norm)
    x = normal(2, 6, 5)
    assert torch.equal(other(x), norm(x))


def test_pickles_from_before_the_activation_load(rung):
    norm = filled(GroupNorm(3, 6))
    del norm.__dict__["activation"]
    other = pickle.loads(pickle.dumps(norm))
    assert "activation" not in other.__dict__
    x = normal(2, 6, 5)
    assert torch.equal(other(x), group_norm(x, 3, norm.weight, norm.bias))
    assert repr(other) == "GroupNorm(3, 6, eps=1e-05, affine=True)"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(rung, mode):
    norm = filled(GroupNorm(3, 6))
    x = normal(2, 6, 5)
    expected = norm(x)
    with mode():
        y = norm(x)
    assert not y.requires_grad
    assert torch.equal(y, expected.detach())


def test_frozen_parameters_get_no_gradient(rung):
    norm = filled(GroupNorm(3, 6)).requires_grad_(False)
    x = normal(2, 6, 5).requires_grad_()
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None


def test_input_without_gradient_is_fine(rung):
    norm = filled(GroupNorm(3, 6))
    norm(normal(2, 6, 5)).sum().backward()
    assert torch.equal(norm.bias.grad, torch.full((6,), 10.0))


@pytest.mark.parametrize(
    ("activation", "per_sample"), [("none", False), ("silu", True), ("gelu_tanh", False)]
)
def test_gradcheck_and_gradgradcheck(rung, activation, per_sample):
    x = normal(2, 4, 3, dtype=torch.float64).requires_grad_()
    row = (2, 4) if per_sample else (4,)
    weight = normal(*row, seed=1, dtype=torch.float64).requires_grad_()
    bias = normal(*row, seed=2, dtype=torch.float64).requires_grad_()

    def call(*tensors):
        return group_norm(tensors[0], 2, tensors[1], tensors[2], activation=activation)

    assert torch.autograd.gradcheck(call, (x, weight, bias))
    assert torch.autograd.gradgradcheck(call, (x, weight, bias))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_into_one_graph(rung, layout, dynamic):
    torch._dynamo.reset()
    norm = filled(GroupNorm(4, 8, activation="silu"))
    compiled = torch.compile(norm, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for height in (5, 6) if dynamic else (5,):
        found = []
        for module in (norm, compiled):
            x = laid_out(normal(2, 8, height, 7), layout).requires_grad_()
            y = module(x)
            assert layout_of(y) == layout
            found.append((y, *torch.autograd.grad(y, [x, *norm.parameters()], torch.ones_like(y))))
        for ours, expected in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_function_compiles_into_one_graph_with_its_default_dtype(rung):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: group_norm(x, 4, activation="relu"), fullgraph=True, backend="aot_eager"
    )
    x = normal(2, 8, 5, dtype=torch.bfloat16)
    assert compiled(x).dtype == torch.bfloat16
    torch.testing.assert_close(compiled(x), group_norm(x, 4, activation="relu"))


def test_compiled_calls_are_not_recorded(rung):
    torch._dynamo.reset()
    norm = GroupNorm(4, 8)
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    steadynorm.rungs._last.rung = None
    compiled(normal(2, 8, 5))
    assert steadynorm.last_rung() is None


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), GroupNorm(4, 8, activation="silu")

    def forward(self, x):
        x = self.norm(self.convolution(x))
        return group_norm(x, 2, self.norm.weight, activation="relu") + group_norm(
            x, 4, out_dtype=torch.float32
        )


def test_fx_traces_module_and_function_as_one_node_each(rung):
    model = Traced()
    filled(model.norm)
    traced = torch.fx.symbolic_trace(model)
    nodes = [n for n in traced.graph.nodes if n.target is group_norm]
    # The module's has the input's dtype, under autocast too.
    assert [n.kwargs["out_dtype"] for n in nodes] == [None, MATCH_STOCK_DTYPE, torch.float32]
    x = normal(2, 3, 9, 8)
    for copied in (traced, pickle.loads(pickle.dumps(traced))):
        assert torch.equal(copied(x), model(x))


def test_fx_traces_the_function_on_a_proxy_of_a_parameter(rung):
    x, weight = normal(2, 6, 4), normal(6, seed=1)
    traced = torch.fx.symbolic_trace(lambda weight: group_norm(x, 3, weight))
    assert torch.equal(traced(weight), group_norm(x, 3, weight))


def test_meta_tensors_have_shape_dtype_and_format(rung):
    x = laid_out(torch.empty(2, 8, 5, 3, device="meta", dtype=torch.bfloat16), "channels_last")
    y = GroupNorm(4, 8, device="meta")(x)
    assert y.device.type == "meta"
    assert y.dtype == torch.bfloat16
    assert layout_of(y) == "channels_last"


def test_function_transforms(rung):
    x, weight = normal(3, 6, 5), normal(6, seed=1)

    def loss(x, weight):
        return group_norm(x, 3, weight, activation="silu").square().sum()

    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for ours, right in zip(torch.func.grad(loss, (0, 1))(x, weight), expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)
    per_sample = torch.func.vmap(torch.func.grad(lambda s, w: loss(s[None], w)), (0, None))(x, weight)
    torch.testing.assert_close(per_sample, expected[0], atol=1e-4, rtol=1e-4)


def test_a_small_network_trains(rung):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), GroupNorm(4, 8, activation="relu"), nn.Conv2d(8, 1, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, losses = laid_out(normal(2, 3, 9, 9), "channels_last"), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
