# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm: which activations are fused, by which proof, and why others are not."""

import copy

import pytest
import torch
import torch.nn.functional as F
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


# --- What is fused by tracing ---------------------------------------------------------------------------


class Block(nn.Module):
    """Norms, activations and a convolution under the names that the forwards below use."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.GroupNorm(1, 3), nn.GroupNorm(3, 3)
        self.act, self.act2 = nn.SiLU(), nn.GELU()
        self.conv = nn.Conv2d(3, 3, 1)
        self.seen, self.scale = [], 2.0
        self.register_buffer("count", torch.zeros(()))


class Residual(Block):
    def forward(self, x):
        h = self.conv(self.act(self.norm(x)))
        h = self.act(self.norm2(h))
        return self.act2(self.conv(h)) * self.scale + x


class InOneSequence(Block):
    def forward(self, x):
        return self.act2(self.norm2(self.act(self.norm(x))))


class CalledTwice(Block):
    def forward(self, x):
        return self.act(self.norm(self.act(self.norm(x))))


class ByName(Block):
    def forward(self, x):
        return self.act(input=self.norm(input=x))


@pytest.mark.parametrize(
    ("cls", "fused"),
    [
        (ByName, {"norm": "silu"}),
        (Residual, {"norm": "silu", "norm2": "silu"}),
        (InOneSequence, {"norm": "silu", "norm2": "gelu"}),
        (CalledTwice, {"norm": "silu"}),
    ],
)
def test_a_forward_without_branches_is_traced(cls, fused):
    model, stock = filled(cls()), filled(cls())
    convert_group_norm(model)
    assert {k: v for k, v in notes(model).items() if k in fused} == fused
    assert type(model.act) is nn.Identity
    assert (type(model.act2) is nn.Identity) == ("gelu" in fused.values())
    assert_computes_the_same(model, stock, IMAGE)
    convert_group_norm(model, back=True)
    assert_computes_the_same(model, stock, IMAGE)
    assert (type(model.norm), type(model.act)) == (nn.GroupNorm, nn.SiLU)


def test_one_activation_under_two_names_is_fused_under_both():
    class Aliased(Block):
        def forward(self, x):
            return self.act2(self.norm2(self.act(self.norm(x))))

    model = filled(Aliased())
    model.act2 = model.act
    stock = copy.deepcopy(model)
    convert_group_norm(model)
    assert type(model.act) is type(model.act2) is nn.Identity
    assert_computes_the_same(model, stock, IMAGE)


def test_a_norm_that_has_an_activation_gets_no_second_one():
    model = filled(Residual())
    model.norm = filled(steadynorm.GroupNorm(1, 3, activation="gelu"))
    stock = copy.deepcopy(model)
    convert_group_norm(model)
    assert notes(model) == {
        "norm": "gelu",
        "norm2": "none: Residual.forward applies act to something else too",
    }
    assert_computes_the_same(model, stock, IMAGE)


def test_a_graph_module_is_converted():
    model = convert_group_norm(torch.fx.symbolic_trace(filled(Residual())))
    assert notes(model) == {"norm": "silu", "norm2": "silu"}
    assert_computes_the_same(model, filled(Residual()), IMAGE)


def helper(h):
    return 2 * h


class Branching(Block):
    def forward(self, x):
        h = self.norm(x)
        if self.training:
            return h
        return self.act(h)


class SecondReader(Block):
    def forward(self, x):
        h = self.norm(x)
        return self.act(h) + h


class Returned(Block):
    def forward(self, x):
        return self.norm(x)


class Functional(Block):
    def forward(self, x):
        return F.silu(self.norm(x))


class OnSomethingElse(Block):
    def forward(self, x):
        return self.act(self.norm(x)) + self.act(x)


class OnAConstant(Block):
    def forward(self, x):
        return self.act(self.norm(x)) + self.act(torch.ones(1))


class Different(Block):
    def forward(self, x):
        return self.act(self.norm(x)) + self.act2(self.norm(x))


class OneOfTwo(Block):
    def forward(self, x):
        h = self.norm2(x)
        return self.act(self.norm(x)) + self.act(h) + h


class Plain(Block):
    def forward(self, x):
        return self.act(self.norm(x))


class OtherMethod(Plain):
    def activate(self, x):
        return self.act(x)


class NamedInAString(Plain):
    def activate(self, x):
        return getattr(self, "act")(x)  # noqa: B009


class OfAProperty(Plain):
    @property
    def activate(self):
        return self.act


class OfAClosure(Plain):
    def activate(self, x):
        return [(lambda h: self.act(h))(row) for row in x]


class Helped(Block):
    def forward(self, x):
        return helper(self.act(self.norm(x)))


class Inherited(Residual):
    def forward(self, x):
        return super().forward(self.act(self.norm(x)))


class Storing(Block):
    def forward(self, x):
        self.last = self.norm(x)
        return self.act(self.last)


class Collecting(Block):
    def forward(self, x):
        self.seen.append(x)
        return self.act(self.norm(x))


class WithLambda(Block):
    def forward(self, x):
        return (lambda h: self.act(h))(self.norm(x))


class Importing(Block):
    def forward(self, x):
        from math import exp

        return self.act(self.norm(x)) * exp(0)


class Setting(Block):
    def forward(self, x):
        setattr(self, "last", x)  # noqa: B010
        return self.act(self.norm(x))


class Reflecting(Block):
    def forward(self, x):
        return getattr(self, "branch")(self.act(self.norm(x)))  # noqa: B009

    def branch(self, x):
        return x if self.training else 2 * x


class ReadingAttribute(Block):
    def forward(self, x):
        return self.act(self.norm(x)) * (2 - self.act.inplace)


class ReadingAlias(Block):
    def forward(self, x):
        act = self.act
        return act(self.norm(x)) * (2 - act.inplace)


class ReadingClass(Block):
    def forward(self, x):
        return self.act(self.norm(x)) * (1 + isinstance(self.act, nn.SiLU))


class ReadingByName(Block):
    def forward(self, x):
        return self.act(self.norm(x)) * (2 - self.get_submodule("act").inplace)


class ReadingType(Block):
    def forward(self, x):
        return self.act(self.norm(x)) * (1 + (type(self.act) is nn.SiLU))


def closing(function):
    class Closing(Block):
        def forward(self, x):
            return function(self.act(self.norm(x)))

    return Closing


class Untraceable(Block):
    def forward(self, x):
        return self.act(self.norm(x)) * len(x.shape)


class Uncalled(Block):
    def forward(self, x):
        return self.act(x)


class OfAChild(Block):
    def __init__(self):
        super().__init__()
        self.other = Block()

    def forward(self, x):
        return self.other.act(self.norm(x))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Branching, "Branching.forward branches, so that its trace is no proof"),
        (SecondReader, "2 operations of SecondReader.forward read it"),
        (Returned, "Returned.forward returns it"),
        (Functional, "silu follows, which is no module"),
        (OnSomethingElse, "OnSomethingElse.forward applies act to something else too"),
        (OnAConstant, "OnAConstant.forward applies act to something else too"),
        (Different, "different modules follow its calls"),
        (OneOfTwo, "OneOfTwo.forward applies act to something else too"),
        (OtherMethod, "OtherMethod.activate may use it too"),
        (NamedInAString, "NamedInAString.activate may use it too"),
        (OfAProperty, "OfAProperty.activate may use it too"),
        (OfAClosure, "OfAClosure.activate may use it too"),
        (Helped, "Helped.forward uses helper, which torch.fx does not see into"),
        (Inherited, "Inherited.forward uses forward, which torch.fx does not see into"),
        (Storing, "Storing.forward changes an object, so that it is not traced"),
        (Collecting, "Collecting.forward uses seen, which torch.fx does not see into"),
        (WithLambda, "WithLambda.forward defines a function, so that its trace is no proof"),
        (Importing, "Importing.forward imports, so that its trace is no proof"),
        (Setting, "Setting.forward uses setattr, which torch.fx does not see into"),
        (Reflecting, "Reflecting.forward uses branch, which torch.fx does not see into"),
        (ReadingAttribute, "ReadingAttribute.forward reads inplace of the SiLU that follows"),
        (ReadingAlias, "ReadingAlias.forward reads inplace of the SiLU that follows"),
        (ReadingClass, "ReadingClass.forward reads __class__ of the SiLU that follows"),
        (ReadingByName, "ReadingByName.forward reads __class__ of the SiLU that follows"),
        (ReadingType, "ReadingType.forward uses type, which torch.fx does not see into"),
        (closing(helper), "Closing.forward uses function, which torch.fx does not see into"),
        (Untraceable, "torch.fx can't trace Untraceable.forward: RuntimeError"),
        (Uncalled, "Uncalled.forward does not call it"),
        (OfAChild, "the SiLU that follows is not a child of OfAChild"),
    ],
)
def test_what_is_not_fused_by_tracing(cls, reason):
    model, stock = filled(cls()), filled(cls())
    convert_group_norm(model)
    assert notes(model)["norm"] == f"none: {reason}"
    assert type(model.act) is nn.SiLU
    assert model.seen == []
    assert "last" not in vars(model)
    for training in (True, False):
        assert_computes_the_same(model.train(training), stock.train(training), IMAGE)


def test_tracing_leaves_buffers_alone():
    class Counting(Block):
        def forward(self, x):
            self.count.add_(1)
            return self.act(self.norm(x)) * self.count

    model = convert_group_norm(Counting())
    assert model.count == 0
    assert notes(model)["norm"] == "silu"
