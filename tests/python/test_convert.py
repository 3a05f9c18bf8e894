# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm: what is kept, what is fused and what is not, the way back, and the report."""

import copy
import doctest
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import steadynorm
from helpers import laid_out, layout_of, normal
from steadynorm import convert, convert_group_norm, fusion

ACTIVATIONS = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
}
NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=number + 5) / 3)
    return model


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """y and every gradient, zero for a parameter that is not used."""
    x = x.clone().requires_grad_()
    y = model(x)
    wanted = {"dx": x} | {name: p for name, p in model.named_parameters() if p.requires_grad}
    dy = normal(*y.shape, seed=3).to(y)
    found = torch.autograd.grad(y, list(wanted.values()), dy, allow_unused=True, materialize_grads=True)
    return {"y": y, **dict(zip(wanted, found, strict=True))}


def assert_computes_the_same(model: nn.Module, expected: nn.Module, x: torch.Tensor) -> None:
    """In float64: sums of under 1e4 terms, a few layers deep, leave 1e-10 far above every rounding."""
    model, expected = copy.deepcopy(model).double(), copy.deepcopy(expected).double()
    torch.testing.assert_close(
        results(model, x.double()), results(expected, x.double()), atol=1e-10, rtol=1e-10
    )


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


IMAGE = normal(2, 3, 9, 8)


# --- What is kept -----------------------------------------------------------------------------------------


def test_every_group_norm_is_ours_and_computes_the_same(rung):
    model, stock = network(), network()
    assert convert_group_norm(model) is model
    assert [type(m) for m in (model[1], model[4])] == [steadynorm.GroupNorm] * 2
    assert_computes_the_same(model, stock, IMAGE)
    model(IMAGE)
    assert steadynorm.last_rung() == rung


def test_modules_parameters_state_and_flags_are_kept():
    model = network().eval()
    model[1].weight.requires_grad_(False)
    model[4].to(torch.bfloat16)
    modules, tensors = dict(model.named_modules()), dict(model.named_parameters())
    convert_group_norm(model)
    assert list(model.state_dict()) == [
        "0.weight",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
        "4.weight",
        "4.bias",
    ]
    for name, tensor in model.named_parameters():
        assert tensor is tensors[name]
    for name, module in model.named_modules():
        assert name == "2" or module is modules[name]
        assert not module.training
    assert not model[1].weight.requires_grad
    assert model[4].weight.dtype == torch.bfloat16


def test_device_is_kept():
    model = convert_group_norm(network().to("meta"))
    assert model(torch.empty(2, 3, 9, 8, device="meta")).device.type == "meta"


def test_state_dict_of_the_stock_model_loads():
    stock, model = network(), convert_group_norm(network())
    with torch.no_grad():
        model[1].weight.zero_()
    assert str(model.load_state_dict(stock.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model[1].weight, stock[1].weight)


def test_optimizer_from_before_the_conversion_trains_the_model():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    convert_group_norm(model)
    before = model[1].weight.clone()
    model(IMAGE).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)


def test_hooks_stay_and_can_be_removed():
    model, called = network(), []
    handle = model[4].register_forward_hook(lambda *_: called.append("forward"))
    model[1].register_full_backward_hook(lambda *_: called.append("backward"))
    convert_group_norm(model)(IMAGE).sum().backward()
    assert called == ["forward", "backward"]
    handle.remove()
    model(IMAGE)
    assert called == ["forward", "backward"]


def test_a_model_that_is_a_norm_is_returned_as_ours():
    norm = convert_group_norm(nn.GroupNorm(2, 4, eps=0.5, affine=False))
    assert type(norm) is steadynorm.GroupNorm
    assert repr(norm) == "GroupNorm(2, 4, eps=0.5, affine=False)"
    assert notes(norm) == {"": "none: it is the model itself"}


def test_shared_norms_and_parameters_stay_shared():
    norm, other = nn.GroupNorm(1, 3), nn.GroupNorm(3, 3)
    other.weight = norm.weight
    model = nn.Sequential(norm, nn.ReLU(), nn.Sequential(norm, nn.SiLU()), other)
    stock = copy.deepcopy(model)
    convert_group_norm(model)
    assert model[0] is model[2][0] is norm
    assert other.weight is norm.weight
    assert notes(model)["0"] == "none: it is used at 2 places"
    assert_computes_the_same(model, stock, IMAGE)


def test_converting_twice_changes_nothing():
    model = convert_group_norm(network())
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    convert_group_norm(model)
    assert [(type(m), dict(vars(m))) for m in model.modules()] == before


def test_activations_are_fused_later_too():
    model = convert_group_norm(network(), fuse_activations=False)
    assert notes(model)["1"] == "none: silu can be fused"
    assert type(model[2]) is nn.SiLU
    assert_computes_the_same(model, network(), IMAGE)
    convert_group_norm(model)
    assert notes(model)["1"] == "silu"
    assert_computes_the_same(model, network(), IMAGE)


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


def test_saved_whole_models_load():
    file = io.BytesIO()
    torch.save(convert_group_norm(network()), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    assert_computes_the_same(model, network(), IMAGE)


@pytest.mark.parametrize("model", [None, [nn.GroupNorm(2, 4)], "model"])
@pytest.mark.parametrize("function", [convert_group_norm, steadynorm.report])
def test_what_is_no_module_is_refused(function, model):
    sentence = f"{function.__name__}: model must be a torch.nn.Module, got {type(model).__name__}"
    with pytest.raises(ValueError) as raised:
        function(model)
    assert str(raised.value) == sentence


# --- What is left alone -----------------------------------------------------------------------------------


class OnlyConstructor(nn.GroupNorm):
    def __init__(self, channels):
        super().__init__(1, channels)


class OwnForward(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) * 2


class OwnProperty(nn.GroupNorm):
    @property
    def eps(self):
        return 0.5

    @eps.setter
    def eps(self, value):
        pass


def overridden(norm: nn.Module) -> nn.Module:
    norm.forward = lambda x: x
    return norm


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: 2 * output)
    return module


def parametrized(norm: nn.Module) -> nn.Module:
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


def scripted(norm: nn.Module) -> nn.Module:
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(norm)


PARAMETRISED = "it is parametrised: its weight or bias is no plain parameter"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnForward(1, 3), "its class OwnForward defines forward"),
        (lambda: OwnProperty(1, 3), "its class OwnProperty defines eps"),
        (lambda: overridden(nn.GroupNorm(1, 3)), "it has a forward of its own"),
        (lambda: parametrized(nn.GroupNorm(1, 3)), PARAMETRISED),
        (lambda: prune.random_unstructured(nn.GroupNorm(1, 3), "bias", 1), PARAMETRISED),
        (lambda: nn.InstanceNorm2d(3, track_running_stats=True), "it keeps running statistics"),
        (lambda: nn.LazyInstanceNorm2d(affine=True), "it is lazy: run a batch before"),
        (lambda: scripted(nn.GroupNorm(1, 3)), "it is compiled by torch.jit: convert before"),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_left_alone_with_the_reason(make, reason, back):
    model = nn.Sequential(make(), nn.ReLU())
    norm, cls = model[0], type(model[0])
    convert_group_norm(model, back=back)
    assert model[0] is norm
    assert type(norm) is cls
    assert type(model[1]) is nn.ReLU
    assert notes(model) == {"0": f"left alone: {reason}"}


def test_old_weight_norm_is_left_alone():
    with pytest.warns(FutureWarning):
        norm = nn.utils.weight_norm(nn.GroupNorm(1, 3))
    assert notes(convert_group_norm(nn.Sequential(norm))) == {"0": f"left alone: {PARAMETRISED}"}
    norm = parametrizations.weight_norm(nn.GroupNorm(1, 3))
    assert notes(convert_group_norm(nn.Sequential(norm))) == {"0": f"left alone: {PARAMETRISED}"}


def test_lazy_norms_convert_after_a_batch():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyInstanceNorm2d(track_running_stats=False), nn.ReLU())
    convert_group_norm(model)
    model(IMAGE)
    assert notes(convert_group_norm(model)) == {"1": "relu"}


def test_a_subclass_with_only_a_constructor_is_converted_and_restored():
    model = filled(nn.Sequential(OnlyConstructor(3), nn.ReLU()))
    stock = copy.deepcopy(model)
    assert type(convert_group_norm(model)[0]) is steadynorm.GroupNorm
    assert_computes_the_same(model, stock, IMAGE)
    convert_group_norm(model, back=True)
    assert type(model[0]) is OnlyConstructor
    assert "stock_class" not in vars(model[0])


# --- What is fused in nn.Sequential -----------------------------------------------------------------------


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


# --- What is fused by tracing -----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("cls", "fused"),
    [
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


class Different(Block):
    def forward(self, x):
        return self.act(self.norm(x)) + self.act2(self.norm(x))


class OneOfTwo(Block):
    def forward(self, x):
        h = self.norm2(x)
        return self.act(self.norm(x)) + self.act(h) + h


class OtherMethod(Block):
    def forward(self, x):
        return self.act(self.norm(x))

    def activate(self, x):
        return self.act(x)


class NamedInAString(OtherMethod):
    def activate(self, x):
        return getattr(self, "act")(x)  # noqa: B009


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
        (Different, "different modules follow its calls"),
        (OneOfTwo, "OneOfTwo.forward applies act to something else too"),
        (OtherMethod, "OtherMethod.activate may use it too"),
        (NamedInAString, "NamedInAString.activate may use it too"),
        (Helped, "Helped.forward uses helper, which torch.fx does not see into"),
        (Inherited, "Inherited.forward uses forward, which torch.fx does not see into"),
        (Storing, "Storing.forward changes an object, so that it is not traced"),
        (Collecting, "Collecting.forward uses seen, which torch.fx does not see into"),
        (WithLambda, "WithLambda.forward defines a function, so that its trace is no proof"),
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


# --- What is fused in known blocks ------------------------------------------------------------------------


class TimeBlock(nn.Module):
    """Has the forward of a residual block of a diffusion model: one activation for norms and embedding."""

    def __init__(self, skip_time_act=False, time_embedding_norm="default", embeds=True):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, 3), nn.GroupNorm(3, 3)
        self.nonlinearity = nn.SiLU()
        self.time_emb_proj = nn.Linear(5, 3) if embeds else None
        self.skip_time_act, self.time_embedding_norm = skip_time_act, time_embedding_norm

    def forward(self, x, temb=None):
        x = self.nonlinearity(self.norm1(x))
        if self.time_emb_proj is not None:
            temb = temb if self.skip_time_act else self.nonlinearity(temb)
            x = x + self.time_emb_proj(temb)[:, :, None, None]
        x = self.norm2(x)
        if self.time_embedding_norm == "scale_shift":
            x = x * 3
        return self.nonlinearity(x)


class WithEmbedding(nn.Module):
    def __init__(self, by_name, **options):
        super().__init__()
        self.block, self.by_name = TimeBlock(**options), by_name
        self.embedding = nn.Parameter(torch.empty(2, 5))

    def forward(self, x):
        return self.block(x, temb=self.embedding) if self.by_name else self.block(x, self.embedding)


@pytest.fixture
def known(monkeypatch):
    name = f"{TimeBlock.__module__}.{TimeBlock.__qualname__}"
    resnet = fusion.KNOWN_BLOCKS["diffusers.models.resnet.ResnetBlock2D"]
    monkeypatch.setitem(fusion.KNOWN_BLOCKS, name, resnet)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("options", [{}, {"skip_time_act": True}, {"embeds": False}])
def test_a_known_block_keeps_its_activation_of_the_embedding(known, by_name, options):
    model, stock = (filled(WithEmbedding(by_name, **options)) for _ in range(2))
    if "embeds" in options:
        model.embedding.requires_grad_(False), stock.embedding.requires_grad_(False)
    convert_group_norm(model)
    assert notes(model) == {"block.norm1": "silu", "block.norm2": "silu"}
    assert type(model.block.nonlinearity) is nn.Identity
    assert len(model.block._forward_pre_hooks) == (not options)
    for converted in (model, pickle.loads(pickle.dumps(model))):
        assert_computes_the_same(converted, stock, IMAGE)
        convert_group_norm(converted, back=True)
        assert type(converted.block.nonlinearity) is nn.SiLU
        assert not converted.block._forward_pre_hooks
        assert not converted.block._forward_pre_hooks_with_kwargs
        assert_computes_the_same(converted, stock, IMAGE)


def test_a_known_block_that_scales_before_its_activation_is_not_fused(known):
    model = convert_group_norm(filled(WithEmbedding(False, time_embedding_norm="scale_shift")))
    reason = "none: a scale and shift stand between norm2 and the activation they share"
    assert notes(model) == {"block.norm1": reason, "block.norm2": reason}
    assert_computes_the_same(model, filled(WithEmbedding(False, time_embedding_norm="scale_shift")), IMAGE)


def test_a_known_block_is_fused_whole_or_not_at_all(known):
    model, stock = (filled(WithEmbedding(False)) for _ in range(2))
    model.block.norm2.register_forward_hook(lambda *_: None)
    convert_group_norm(model)
    assert notes(model)["block.norm1"] == "none: norm2 shares the activation and can't have it fused"
    assert_computes_the_same(model, stock, IMAGE)


def test_a_known_blocks_other_activations_stay(known):
    model = WithEmbedding(False)
    model.block.nonlinearity = nn.Mish()
    assert set(notes(convert_group_norm(model)).values()) == {"none: Mish follows"}


# --- InstanceNorm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("rank", NORMS)
def test_instance_norm_computes_the_same(rung, rank, affine, batched):
    model = filled(nn.Sequential(NORMS[rank](3, eps=0.1, affine=affine), nn.ReLU()))
    stock = copy.deepcopy(model)
    convert_group_norm(model)
    assert isinstance(model[0], NORMS[rank])
    assert notes(model) == {"0": "relu"}
    assert repr(model[0]).endswith("activation=relu)")
    assert list(model.state_dict()) == list(stock.state_dict())
    x = normal(2, 3, 6, 5, 4)[..., 0, 0] if rank == 1 else normal(2, 3, 6, 5, 4)[(..., 0)[: 4 - rank]]
    assert_computes_the_same(model, stock, x if batched else x[0])
    model(x)
    assert steadynorm.last_rung() == rung


def test_instance_norm_keeps_dtype_and_format(rung):
    norm = convert_group_norm(nn.InstanceNorm3d(3, affine=True))
    x = laid_out(normal(2, 3, 4, 5, 6, dtype=torch.bfloat16), "channels_last")
    with torch.autocast("cpu", dtype=torch.float16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    assert layout_of(y) == "channels_last"


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((2, 3, 1, 1), "Expected more than 1 spatial element"),
        ((2, 3, 4, 4, 4), "expected 3D or 4D input"),
        ((2, 5, 4, 4), "to match num_features"),
    ],
)
def test_instance_norms_errors_are_stocks(shape, sentence):
    for norm in (nn.InstanceNorm2d(3, affine=True), convert_group_norm(nn.InstanceNorm2d(3, affine=True))):
        with pytest.raises(ValueError, match=sentence):
            norm(torch.zeros(shape))


def test_instance_norm_is_restored():
    model = nn.Sequential(nn.InstanceNorm1d(3, momentum=0.3), nn.GELU("tanh"))
    before = [(type(m), repr(m), list(vars(m))) for m in model.modules()]
    convert_group_norm(model)
    assert type(model[0]) is not nn.InstanceNorm1d
    convert_group_norm(model, back=True)
    assert [(type(m), repr(m), list(vars(m))) for m in model.modules()] == before


# --- The way back -----------------------------------------------------------------------------------------


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


# --- Wrapped models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_converts_before_and_after_compile(before):
    torch._dynamo.reset()
    model = convert_group_norm(network()) if before else network()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(IMAGE)
    if not before:
        stock_norms = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert convert_group_norm(compiled) is compiled
        torch.testing.assert_close(compiled(IMAGE), y, atol=1e-5, rtol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == stock_norms + 1
    torch.testing.assert_close(compiled(IMAGE), model(IMAGE), atol=1e-6, rtol=1e-6)


@pytest.fixture
def one_process(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch is built without torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_converts_inside_ddp(one_process):
    model = nn.parallel.DistributedDataParallel(network())
    convert_group_norm(model)
    assert notes(model) == {"module.1": "silu", "module.4": "none: nothing follows in its Sequential"}
    model(IMAGE).sum().backward()
    expected = network()
    expected(IMAGE).sum().backward()
    for ours, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, right.grad, atol=1e-4, rtol=1e-4)


def test_converts_inside_fully_sharded_models(one_process):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model = network()
    fully_shard(model[4], mesh=mesh)
    fully_shard(model, mesh=mesh)
    convert_group_norm(model)
    assert notes(model)["4"].startswith("left alone: its class FSDPGroupNorm defines ")
    assert type(model[1]) is steadynorm.GroupNorm
    torch.testing.assert_close(model(IMAGE), network()(IMAGE), atol=1e-5, rtol=1e-5)


# --- The report -------------------------------------------------------------------------------------------


def test_the_report_is_a_table(native):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(4, 8),
        nn.SiLU(),
        OwnForward(2, 8),
        nn.ModuleDict({"x": nn.GroupNorm(1, 3)}),
    )
    convert_group_norm(model)
    model[4]["x"].__class__ = nn.GroupNorm
    with steadynorm.report(model) as seen:
        model[3](model[1](model[0](IMAGE).bfloat16()).float())
    assert repr(seen).splitlines() == [
        "site  module      shape         dtype     rung    activation",
        "1     GroupNorm   [2, 8, 7, 6]  bfloat16  native  silu",
        "3     OwnForward  [2, 8, 7, 6]  float32   stock   left alone: its class OwnForward defines forward",
        "4.x   GroupNorm   not seen                        not converted",
    ]
    row = seen.rows[0]
    assert (row.site, row.module, row.note) == ("1", "GroupNorm", "silu")
    assert (row.shape, row.dtype, row.rung) == ((2, 8, 7, 6), "bfloat16", "native")


def test_the_report_tells_the_rung_and_a_changed_dtype(rung):
    norm = convert_group_norm(nn.GroupNorm(1, 3))
    with steadynorm.report(norm) as seen:
        norm(input=IMAGE)
    assert seen.rows[0].rung == rung
    stock = nn.GroupNorm(1, 3).to(torch.float64)
    stock.forward = lambda x: x.double()
    with steadynorm.report(stock) as seen:
        stock(IMAGE)
    assert (seen.rows[0].rung, seen.rows[0].dtype) == ("stock", "float32 -> float64")


def test_the_report_leaves_no_hook_behind():
    model = convert_group_norm(network())
    with pytest.raises(ZeroDivisionError), steadynorm.report(model) as seen:
        1 / 0  # noqa: B018
    model(IMAGE)
    assert seen.rows[0].shape is None
    assert not any(fusion.has_hooks(module) for module in model.modules())


def test_compiled_calls_are_not_noted_and_stay_in_one_graph():
    torch._dynamo.reset()
    model = convert_group_norm(network())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with steadynorm.report(model) as seen:
        compiled(IMAGE)
    assert seen.rows[0].shape is None


def test_a_model_without_norms_has_an_empty_report():
    assert repr(steadynorm.report(nn.ReLU())) == "no GroupNorm and no InstanceNorm"


def test_the_docstrings_examples_run(native):
    result = doctest.testmod(convert)
    assert result.attempted > 0
    assert result.failed == 0
