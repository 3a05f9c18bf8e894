# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm(model, back=True): what is restored, and what stays fused."""

import copy
import pickle

import pytest
import torch
from torch import nn

import steadynorm
from convert_helpers import IMAGE, network, notes
from helpers import filled
from steadynorm import convert_group_norm


def test_back_restores_modules_and_activations():
    model = network()
    modules, before = dict(model.named_modules()), [(type(m), list(vars(m))) for m in model.modules()]
    convert_group_norm(model).eval()
    assert convert_group_norm(model, back=True) is model
    assert dict(model.named_modules()) == modules
    assert [(type(m), list(vars(m))) for m in model.modules()] == before
    assert not any(m.training for m in model.modules())
    assert notes(model) == {"1": "not converted", "4": "not converted"}


def test_back_leaves_alone_an_activation_that_has_no_place():
    model = nn.Sequential(steadynorm.GroupNorm(1, 3), steadynorm.GroupNorm(1, 3, activation="relu"))
    convert_group_norm(model, back=True)
    assert type(model[0]) is nn.GroupNorm
    assert type(model[1]) is steadynorm.GroupNorm
    assert model[1].activation == "relu"


def test_back_leaves_fused_what_is_put_together_from_copies():
    model = convert_group_norm(filled(nn.Sequential(nn.GroupNorm(3, 3), nn.SiLU())))
    other = nn.Sequential(*[copy.deepcopy(module) for module in model])
    convert_group_norm(other, back=True)
    assert notes(other) == {"0": "silu"}
    assert torch.equal(other(IMAGE), model(IMAGE))


@pytest.mark.parametrize(
    "share",
    [
        lambda model: nn.Sequential(*model),
        torch.fx.symbolic_trace,
        lambda model: nn.Sequential(model, *model),
    ],
    ids=["of the same modules", "traced", "within one model"],
)
def test_back_leaves_fused_what_another_module_shares(share):
    model = convert_group_norm(filled(nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU())))
    sharing = share(model)
    before = model(IMAGE), sharing(IMAGE)
    convert_group_norm(sharing, back=True)
    assert notes(model) == {"0": "silu"}
    torch.testing.assert_close((model(IMAGE), sharing(IMAGE)), before, atol=0, rtol=0)
    convert_group_norm(model, back=True)
    assert [type(module) for module in model] == [nn.GroupNorm, nn.SiLU]


def test_back_leaves_fused_where_the_identity_is_gone():
    model = convert_group_norm(filled(nn.Sequential(nn.GroupNorm(1, 3), nn.SiLU())))
    identity, model[1] = model[1], nn.Conv2d(3, 3, 1)
    assert notes(convert_group_norm(model, back=True)) == {"0": "silu"}
    model[1] = identity
    assert notes(convert_group_norm(model, back=True)) == {"0": "not converted"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_work_and_convert_back_on_their_own(duplicate):
    relu = nn.ReLU()
    model = convert_group_norm(nn.Sequential(nn.GroupNorm(3, 3), relu, nn.GroupNorm(1, 3), relu))
    other = duplicate(model)
    assert torch.equal(other(IMAGE), model(IMAGE))
    convert_group_norm(other, back=True)
    assert type(other[1]) is nn.ReLU
    assert other[1] is other[3]
    assert other[1] is not relu
    assert notes(model) == {"0": "relu", "2": "relu"}
    torch.testing.assert_close(other(IMAGE), model(IMAGE), atol=1e-5, rtol=1e-5)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(1, 3), nn.SiLU()
        self.again = self.act

    def forward(self, x):
        return self.again(self.norm(self.act(self.norm(x))))


def test_back_leaves_alone_what_took_one_of_two_places():
    model = convert_group_norm(TwoNames())
    assert type(model.act) is type(model.again) is nn.Identity
    model.again = nn.Tanh()
    assert notes(convert_group_norm(model, back=True)) == {"norm": "silu"}
    assert type(model.again) is nn.Tanh
