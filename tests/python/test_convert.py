# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm: what is kept, what is left alone, InstanceNorm, wrapped models."""

import copy
import doctest
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import steadynorm
from convert_helpers import IMAGE, OwnForward, assert_computes_the_same, network, notes, overridden
from helpers import filled, laid_out, layout_of, normal
from steadynorm import convert, convert_group_norm

NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


# --- What is kept ---------------------------------------------------------------------------------------


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


# --- What is left alone ---------------------------------------------------------------------------------


class OnlyConstructor(nn.GroupNorm):
    """Has nothing to lose."""

    groups: int

    def __init__(self, channels):
        super().__init__(1, channels)


class OwnProperty(nn.GroupNorm):
    @property
    def eps(self):
        return 0.5

    @eps.setter
    def eps(self, value):
        pass


class OwnAttribute(nn.GroupNorm):
    momentum = 0.5


class Momentum:
    momentum = 0.5


class FromMixin(nn.InstanceNorm2d, Momentum):
    pass


def parametrized(norm: nn.Module) -> nn.Module:
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


def scripted(norm: nn.Module) -> nn.Module:
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(norm)


PARAMETRISED = "it is parametrised: its weight or bias is no plain parameter"


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("compiler", [torch.jit.script, lambda m: torch.jit.trace(m, IMAGE)])
def test_a_script_module_is_left_alone(compiler, back):
    with pytest.warns(DeprecationWarning):
        model = compiler(network())
    assert convert_group_norm(model, back=back) is model
    reason = "left alone: it is compiled by torch.jit"
    assert notes(model) == {"1": reason, "4": reason}
    with steadynorm.report(model) as seen:
        model(IMAGE)
    assert seen.rows[0].shape is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnForward(1, 3), "its class OwnForward defines forward"),
        (lambda: OwnProperty(1, 3), "its class OwnProperty defines eps"),
        (lambda: OwnAttribute(1, 3), "its class OwnAttribute defines momentum"),
        (lambda: FromMixin(3), "its class FromMixin defines momentum"),
        (lambda: overridden(nn.GroupNorm(1, 3)), "it has a forward of its own"),
        (lambda: parametrized(nn.GroupNorm(1, 3)), PARAMETRISED),
        (lambda: prune.random_unstructured(nn.GroupNorm(1, 3), "bias", 1), PARAMETRISED),
        (lambda: nn.InstanceNorm2d(3, track_running_stats=True), "it keeps running statistics"),
        (lambda: nn.LazyInstanceNorm2d(affine=True), "it is lazy: run a batch before"),
        (lambda: scripted(nn.GroupNorm(1, 3)), "it is compiled by torch.jit"),
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


# --- InstanceNorm ---------------------------------------------------------------------------------------


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


def test_instance_norm_is_converted_in_a_traced_model():
    stock = torch.fx.symbolic_trace(
        filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU()))
    )
    model = convert_group_norm(copy.deepcopy(stock))
    assert notes(model) == {"1": "relu"}
    assert_computes_the_same(model, stock, IMAGE)


def test_instance_norm_is_restored():
    model = nn.Sequential(nn.InstanceNorm1d(3, momentum=0.3), nn.GELU("tanh"))
    before = [(type(m), repr(m), list(vars(m))) for m in model.modules()]
    convert_group_norm(model)
    assert type(model[0]) is not nn.InstanceNorm1d
    convert_group_norm(model, back=True)
    assert [(type(m), repr(m), list(vars(m))) for m in model.modules()] == before


# --- Wrapped models -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("before", [True, False])
def test_converts_before_and_after_ddp(one_process, before):
    model = network()
    if before:
        convert_group_norm(model)
    model = convert_group_norm(nn.parallel.DistributedDataParallel(model))
    assert notes(model) == {"module.1": "silu", "module.4": "none: nothing follows in its Sequential"}
    model(IMAGE).sum().backward()
    expected = network()
    expected(IMAGE).sum().backward()
    for ours, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, right.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("before", [True, False])
def test_converts_before_and_after_full_sharding(one_process, before):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model = network()
    if before:
        convert_group_norm(model)
    else:
        fully_shard(model[4], mesh=mesh)
    convert_group_norm(fully_shard(model, mesh=mesh))
    assert type(model[1]) is steadynorm.GroupNorm
    if before:
        assert notes(model)["1"] == "silu"
    else:  # its hooks prevent fusion
        assert notes(model)["1"] == "none: the norm has hooks"
        assert notes(model)["4"].startswith("left alone: its class FSDPGroupNorm defines ")
    torch.testing.assert_close(model(IMAGE), network()(IMAGE), atol=1e-5, rtol=1e-5)


def test_the_docstrings_examples_run(native):
    result = doctest.testmod(convert)
    assert result.attempted > 0
    assert result.failed == 0
