# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm: which activations are fused by the graph of a forward, and why others are not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steadynorm
from convert_helpers import IMAGE, assert_computes_the_same, notes
from helpers import filled
from steadynorm import convert_group_norm


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
