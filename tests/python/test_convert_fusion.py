# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm: which activations are fused in nn.Sequential, and why others are not."""

import copy

import pytest
import torch
from torch import nn

import steadynorm
from convert_helpers import IMAGE, assert_computes_the_same, hooked, notes, overridden
from helpers import filled
from steadynorm import convert_group_norm

ACTIVATIONS = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
}


# --- What is fused in nn.Sequential ---------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_next_activation_of_a_sequential_is_fused(rung, activation):
    model = filled(nn.Sequential(nn.GroupNorm(1, 3), ACTIVATIONS[activation]()))
    stock = copy.deepcopy(model)
    convert_group_norm(model)
    assert model[0].activation == activation
    assert type(model[1]) is nn.Identity
    assert notes(model) == {"0": activation}
    assert_computes_the_same(model, stock, IMAGE)


def test_an_activation_that_works_in_place_is_fused():
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU(inplace=True))
    assert notes(convert_group_norm(model)) == {"0": "relu"}
    assert_computes_the_same(model, nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU()), IMAGE)


def test_what_does_nothing_may_stand_between(rung):
    model = filled(nn.Sequential(nn.GroupNorm(1, 3), nn.Dropout3d(0.0), nn.Identity(), nn.SiLU()))
    stock = copy.deepcopy(model)
    assert notes(convert_group_norm(model)) == {"0": "silu"}
    assert_computes_the_same(model, stock, IMAGE)


def test_a_shared_activation_stays_where_no_norm_precedes_it():
    relu = nn.ReLU()
    model = filled(
        nn.Sequential(nn.GroupNorm(1, 3), relu, nn.Conv2d(3, 3, 1), relu, nn.GroupNorm(3, 3), relu)
    )
    stock = copy.deepcopy(model)
    convert_group_norm(model)
    assert [type(model[place]) for place in (1, 3, 5)] == [nn.Identity, nn.ReLU, nn.Identity]
    assert model[3] is relu
    assert_computes_the_same(model, stock, IMAGE)


class Doubled(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = 2 * module(x)
        return x


class OwnReLU(nn.ReLU):
    pass


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU6()), "ReLU6 follows"),
        (nn.Sequential(nn.GroupNorm(1, 3), nn.LeakyReLU()), "LeakyReLU follows"),
        (nn.Sequential(nn.GroupNorm(1, 3), OwnReLU()), "OwnReLU follows"),
        (nn.Sequential(nn.GroupNorm(1, 3), nn.Dropout(0.1), nn.ReLU()).eval(), "Dropout follows"),
        (nn.Sequential(nn.GroupNorm(1, 3), overridden(nn.Identity()), nn.ReLU()), "Identity follows"),
        (nn.Sequential(nn.GroupNorm(1, 3), hooked(nn.Identity()), nn.ReLU()), "Identity follows"),
        (nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 3)), "nothing follows in its Sequential"),
        (nn.Sequential(nn.Sequential(nn.GroupNorm(1, 3)), nn.ReLU()), "nothing follows in its Sequential"),
        (
            nn.Sequential(nn.GroupNorm(1, 3), overridden(nn.ReLU())),
            "the ReLU that follows has a forward of its own",
        ),
        (
            overridden(nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())),
            "the forward of this Sequential is overridden",
        ),
        (Doubled(nn.GroupNorm(1, 3), nn.ReLU()), "Doubled.forward branches, so that its trace is no proof"),
    ],
)
def test_what_is_not_fused_in_a_sequential(model, reason):
    model = copy.deepcopy(model)
    before = copy.deepcopy(model)
    convert_group_norm(model)
    assert list(notes(model).values()) == [f"none: {reason}"]
    assert_computes_the_same(model, before, IMAGE)


HOOKS = [
    nn.Module.register_forward_hook,
    nn.Module.register_forward_pre_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_state_dict_post_hook,
    nn.Module.register_state_dict_pre_hook,
    nn.Module.register_load_state_dict_pre_hook,
    nn.Module.register_load_state_dict_post_hook,
]


@pytest.mark.parametrize("register", HOOKS, ids=lambda r: r.__name__)
@pytest.mark.parametrize(
    ("place", "reason"), [(0, "the norm has hooks"), (1, "the ReLU that follows has hooks")]
)
def test_nothing_is_fused_where_there_are_hooks(register, place, reason):
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    register(model[place], lambda *_: None)
    convert_group_norm(model)
    assert type(model[0]) is steadynorm.GroupNorm
    assert type(model[1]) is nn.ReLU
    assert notes(model) == {"0": f"none: {reason}"}


REGISTER = [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook]


@pytest.mark.parametrize("register", REGISTER, ids=lambda r: r.__name__)
@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_is_fused_below_a_module_with_forward_hooks(register, depth):
    block = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    model = nn.Sequential(nn.ModuleList([block]) if depth else block)
    handle = register(block if depth == 0 else model, lambda *_: None)
    convert_group_norm(model)
    assert list(notes(model).values()) == ["none: the Sequential around it has hooks"]
    handle.remove()
    assert list(notes(model).values()) == ["none: relu can be fused"]


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
    ids=lambda r: r.__name__,
)
def test_nothing_is_fused_while_all_modules_have_hooks(register):
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    handle = register(lambda *_: None)
    try:
        convert_group_norm(model)
        assert notes(model) == {"0": "none: hooks of all modules are registered"}
    finally:
        handle.remove()
    assert notes(model) == {"0": "none: relu can be fused"}


def test_the_reports_own_hooks_do_not_prevent_fusion():
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    with steadynorm.report(model):
        convert_group_norm(model)
    assert notes(model) == {"0": "relu"}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "hold",
    [
        lambda module: [module],
        lambda module: {"by name": (1, module)},
        lambda module: {module},
        lambda module: module.forward,
    ],
    ids=["list", "nested", "set", "method"],
)
def test_nothing_is_fused_that_an_attribute_holds(hold, place):
    model = nn.Sequential(nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU()), nn.Flatten())
    model[1].kept = hold(model[0][place])
    convert_group_norm(model)
    what = "it" if place == 0 else "the ReLU that follows"
    assert notes(model) == {"0.0": f"none: Flatten.kept holds {what} too"}
    del model[1].kept
    assert notes(model) == {"0.0": "none: relu can be fused"}


def test_nothing_is_fused_that_a_bare_attribute_holds():
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    vars(model)["first"] = model[0]
    assert notes(convert_group_norm(model)) == {"0": "none: Sequential.first holds it too"}


def test_what_conversion_itself_holds_does_not_prevent_fusion():
    relu = nn.ReLU()
    model = convert_group_norm(nn.Sequential(nn.GroupNorm(1, 3), relu))
    model.extend([nn.GroupNorm(3, 3), relu])
    assert notes(convert_group_norm(model)) == {"0": "relu", "2": "relu"}


def test_an_attribute_that_holds_itself_is_searched_once():
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    model.kept = []
    model.kept.append(model.kept)
    assert notes(convert_group_norm(model)) == {"0": "relu"}


@pytest.mark.parametrize(
    "give",
    [
        lambda act: act.register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda act: act.register_buffer("seen", torch.ones(1)),
        lambda act: act.add_module("child", nn.Linear(1, 1)),
    ],
    ids=["parameter", "buffer", "module"],
)
def test_an_activation_with_a_state_is_not_fused(give):
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    give(model[1])
    keys = list(model.state_dict())
    convert_group_norm(model)
    assert list(model.state_dict()) == keys
    assert notes(model) == {"0": "none: the ReLU that follows has parameters, buffers or modules"}


class OnlyConstructor(nn.Sequential):
    """Is an nn.Sequential."""

    depth: int

    def __init__(self):
        super().__init__(nn.GroupNorm(1, 3), nn.ReLU())


class Iterating(OnlyConstructor):
    def __iter__(self):
        return iter([*super().__iter__(), self[0]])


class Calling(OnlyConstructor):
    def __call__(self, x):
        return self[0](super().__call__(x))


class Selecting(OnlyConstructor):
    def __getitem__(self, index):
        return super().__getitem__(index)


class Features:
    def features(self, x):
        return self[0](x)


class WithMixin(OnlyConstructor, Features):
    pass


def test_a_sequential_with_only_a_constructor_of_its_own_is_one():
    assert notes(convert_group_norm(OnlyConstructor())) == {"0": "relu"}


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (Iterating, "__iter__"),
        (Calling, "__call__"),
        (Selecting, "__getitem__"),
        (WithMixin, "features"),
    ],
)
def test_a_sequential_that_defines_more_is_not_fused(cls, name):
    model, stock = filled(cls()), filled(cls())
    convert_group_norm(model)
    assert notes(model) == {"0": f"none: {cls.__name__} defines {name}"}
    assert_computes_the_same(model, stock, IMAGE)
