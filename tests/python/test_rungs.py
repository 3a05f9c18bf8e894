# SPDX-License-Identifier: Apache-2.0
"""The ladder: which rung serves, what latches one off, and that all agree. Failures are injected."""

import copy
import doctest
import itertools
import pickle
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import steadynorm
from examples.brain_unet import measure
from examples.brain_unet.model import UNet, norm_sites, steady_norm
from helpers import LAUNCH_FAILED, RUNGS, broken, laid_out, layout_of, normal, outputs, use_rung
from steadynorm import GroupNorm, _native, compiled, eager, group_norm, rungs
from steadynorm import __main__ as program

# Order and switches.


def test_the_first_rung_that_is_on_serves(ladder):
    x = normal(2, 6, 4)
    for name in RUNGS:
        group_norm(x, 3)
        assert steadynorm.last_rung() == name
        GroupNorm(3, 6)(x)
        assert steadynorm.last_rung() == name
        if name != rungs.EAGER:
            steadynorm.set_rung(name, False)
            assert rungs.ladder[name].state() == "off: turned off by set_rung"


def test_set_rungs_example_runs(ladder):
    assert doctest.testmod(rungs) == doctest.TestResults(0, 7)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("eager", False), "set_rung: name must be one of native, compiled, got 'eager'"),
        ((None, False), "set_rung: name must be one of native, compiled, got None"),
        ((["native"], False), "set_rung: name must be one of native, compiled, got ['native']"),
        (("native", 0), "set_rung: on must be True or False, got 0"),
    ],
)
def test_set_rung_says_what_is_wrong(ladder, arguments, sentence):
    with pytest.raises(ValueError) as raised:
        steadynorm.set_rung(*arguments)
    assert str(raised.value) == sentence


def test_a_missing_library_cant_be_turned_on(ladder, tmp_path):
    missing = _native.load([str(tmp_path)])
    ladder.setattr(rungs, "native", missing)
    ladder.setattr(rungs, "_search_path", [str(tmp_path)])
    ladder.setattr(rungs.native_rung, "off", missing.reason)
    with pytest.raises(RuntimeError) as raised:
        steadynorm.set_rung("native", True)
    assert str(raised.value) == f"set_rung: the native rung can't be turned on: {missing.reason}"
    assert rungs.native_rung.state() == f"off: {missing.reason}"


def test_a_rung_off_in_the_environment_can_be_turned_on_later(ladder):
    path = str(rungs.native.path.parents[1])
    ladder.setattr(rungs, "native", _native.Native())
    ladder.setattr(rungs, "_search_path", [])
    ladder.setenv("STEADYNORM_NATIVE", "0")
    ladder.setenv("STEADYNORM_COMPILE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rungs.start([path])
        assert rungs.native.operator is None
        group_norm(normal(2, 6, 4), 3)
        assert steadynorm.last_rung() == "eager"
        rungs._refused[torch.device("meta")] = "as it was"
        steadynorm.set_rung("native", True)
        assert rungs._refused == {}
        group_norm(normal(2, 6, 4), 3)
        assert steadynorm.last_rung() == "native"


@pytest.mark.parametrize("variable", ["STEADYNORM_NATIVE", "STEADYNORM_COMPILE"])
def test_a_bad_value_of_a_variable_is_one_sentence(ladder, variable):
    ladder.setenv(variable, "yes")
    with pytest.raises(ValueError) as raised:
        rungs.start(list(rungs._search_path))
    assert str(raised.value) == f"steadynorm: {variable} must be 0 (off) or 1 (on), got 'yes'"


# Agreement.

AGREEMENT = [
    # autocast, layout, dtype, out_dtype, weight, bias, activation
    (False, "contiguous", torch.float32, None, "[C]", "[C]", "none"),
    (True, "contiguous", torch.float32, None, "[C]", "[C]", "relu"),
    (True, "channels_last", torch.bfloat16, None, "[C]", "[C]", "relu"),
    (False, "channels_last", torch.float16, torch.float32, "[N, C]", "[N, C]", "silu"),
    (False, "strided", torch.bfloat16, torch.float32, None, "[C]", "gelu"),
    (True, "contiguous", torch.float16, torch.bfloat16, "[C]", "[N, C]", "gelu_tanh"),
    (False, "channels_last", torch.float32, torch.bfloat16, None, None, "silu"),
    (True, "strided", torch.float64, None, "[N, C]", None, "none"),
]


@pytest.mark.parametrize(
    ("autocast", "layout", "dtype", "out_dtype", "weight", "bias", "activation"), AGREEMENT
)
def test_compiled_agrees_with_native(ladder, autocast, layout, dtype, out_dtype, weight, bias, activation):
    """Values to fp32 rounding, dtype, memory format; forward and every gradient."""
    shape = (3, 12, 7, 10)
    x, dy = normal(*shape, seed=1, dtype=dtype), normal(*shape, seed=2, dtype=out_dtype or dtype)
    x, dy = (x[..., ::2], dy[..., ::2]) if layout == "strided" else (laid_out(x, layout), dy)
    rows = {None: None, "[C]": (12,), "[N, C]": (3, 12)}
    w = None if weight is None else 1 + normal(*rows[weight], seed=3) / 3
    b = None if bias is None else normal(*rows[bias], seed=4) / 3
    found = {}
    for name in (rungs.NATIVE, rungs.COMPILED):
        use_rung(name, ladder)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found[name] = outputs(x, 4, w, b, dy=dy, activation=activation, out_dtype=out_dtype)
        assert steadynorm.last_rung() == name
    for key, expected in found[rungs.NATIVE].items():
        ours = found[rungs.COMPILED][key]
        assert ours.dtype == expected.dtype
        assert layout_of(ours) == layout_of(expected)
        tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}.get(ours.dtype, 1e-14)
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            ours / scale, expected / scale, atol=tolerance, rtol=tolerance, check_stride=False
        )


def test_the_compiled_rung_refuses_what_the_others_refuse(ladder):
    use_rung(rungs.COMPILED, ladder)
    with pytest.raises(
        ValueError, match=r"^group_norm: eps must be finite and not negative, got eps=-1e-10$"
    ):
        group_norm(normal(2, 6, 4), 3, eps=-1e-10)
    with pytest.raises(
        ValueError, match=r"^group_norm: a float64 weight needs a float64 input, got input float32$"
    ):
        group_norm(normal(2, 6, 4), 3, torch.ones(6, dtype=torch.float64))
    assert compiled.rung.failure is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_output_is_rounded_once(ladder, dtype):
    use_rung(rungs.COMPILED, ladder)
    x, weight = normal(2, 12, 9, 7, dtype=dtype), normal(12, seed=1)
    wide = group_norm(x, 4, weight, activation="gelu", out_dtype=torch.float32)
    assert torch.equal(group_norm(x, 4, weight, activation="gelu", out_dtype=dtype), wide.to(dtype))
    assert steadynorm.last_rung() == rungs.COMPILED


def test_gradients_of_the_compiled_rung_have_gradients(ladder):
    use_rung(rungs.COMPILED, ladder)
    x, weight, bias = (normal(*s, dtype=torch.float64).requires_grad_() for s in ((2, 4, 3), (4,), (4,)))

    def call(*tensors):
        return group_norm(tensors[0], 2, *tensors[1:], activation="silu")

    assert torch.autograd.gradgradcheck(call, (x, weight, bias), fast_mode=True)
    assert steadynorm.last_rung() == rungs.COMPILED
    y = call(x, weight, bias)
    batch = normal(3, *y.shape, dtype=torch.float64)
    together = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)[0]
    alone = torch.stack([torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in batch])
    torch.testing.assert_close(together, alone)
    assert compiled.rung.failure is None


def test_a_weight_made_from_the_input_has_its_own_part_of_the_gradient(ladder):
    x, dy = (normal(2, 4, 3, seed=seed, dtype=torch.float64).requires_grad_() for seed in (1, 2))

    def second():
        y = group_norm(x, 2, x.mean(2), x[:, :, 0])
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return dx, *torch.autograd.grad(dx.square().sum(), (x, dy))

    expected = second()
    use_rung(rungs.COMPILED, ladder)
    torch.testing.assert_close(second(), expected)
    assert steadynorm.last_rung() == rungs.COMPILED


def test_the_compiled_rung_saves_its_arguments_alone(ladder):
    use_rung(rungs.COMPILED, ladder)
    saved = []
    x, weight = normal(2, 6, 4, dtype=torch.bfloat16).requires_grad_(), torch.ones(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        group_norm(x, 3, weight)
    assert [t.data_ptr() for t in saved] == [x.data_ptr(), weight.data_ptr()]


CONTEXTS = {
    "vmap": lambda x: torch.func.vmap(lambda s: group_norm(s[None], 3)[0])(x),
    "grad": lambda x: torch.func.grad(lambda s: group_norm(s, 3).square().sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda s: group_norm(s, 3), (x,), (torch.ones_like(x),))[1],
    "dual": lambda x: dual(x),
    "jit.trace": lambda x: torch.jit.trace(lambda x: group_norm(x, 3), x, check_trace=False)(x),
    "make_fx": lambda x: make_fx(lambda x: group_norm(x, 3))(x)(x),
    "empty": lambda x: group_norm(x[:0], 3),
    "meta": lambda x: group_norm(x.to("meta"), 3),
}


def dual(x):
    with torch.autograd.forward_ad.dual_level():
        y = group_norm(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), 3)
        return torch.autograd.forward_ad.unpack_dual(y).tangent


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("context", CONTEXTS)
def test_what_compiled_code_cant_do_is_eagers(ladder, context):
    x = normal(2, 6, 4)
    expected = CONTEXTS[context](x)
    use_rung(rungs.COMPILED, ladder)
    found = CONTEXTS[context](x)
    assert steadynorm.last_rung() == rungs.EAGER
    assert compiled.rung.failure is None
    if context != "meta":
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_tangent_of_the_incoming_gradient_is_not_dropped(ladder):
    """Stock's backward has no forward mode, and says so; compiled code would say nothing."""
    use_rung(rungs.COMPILED, ladder)
    x = normal(2, 6, 4).requires_grad_()
    y = group_norm(x, 3)
    ladder.setattr(compiled, "_formula", lambda *_: pytest.fail("compiled code is asked"))
    with torch.autograd.forward_ad.dual_level():
        dy = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match="forward AD"):
            torch.autograd.grad(y, x, dy)


@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_that_comes_contiguous_is_brought_to_the_inputs_format(ladder, again):
    """As stock's does on CUDA."""
    use_rung(rungs.COMPILED, ladder)
    x = laid_out(normal(2, 6, 4, 3), "channels_last").requires_grad_()
    y = group_norm(x, 3)
    formula = eager.formula

    def relaid(x, *rest):
        x = x.view_as(x)
        x.register_hook(torch.Tensor.contiguous)
        return formula(x, *rest)

    for module, name in ((eager, "formula"), (compiled, "_formula")):
        ladder.setattr(module, name, relaid)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=again)
    assert layout_of(dx) == "channels_last"


def test_in_code_that_the_user_compiles_nothing_is_compiled_again(ladder):
    use_rung(rungs.COMPILED, ladder)
    graphs = []
    norm = GroupNorm(3, 6)

    def backend(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    before = len(compiled._kinds)
    call = torch.compile(lambda x: norm(x) + 1, fullgraph=True, backend=backend)
    x = normal(2, 6, 4)
    torch.testing.assert_close(call(x), eager.group_norm(x, 3, None, None, 1e-5, "none", None) + 1)
    assert len(graphs) == 1
    assert any("group_norm" in name for name in graphs[0])
    assert len(compiled._kinds) == before


def test_in_code_that_the_user_compiles_a_latch_counts(ladder):
    graphs = []

    def backend(graph, inputs):
        graphs.append(any("steadynorm" in str(n.target) for n in graph.graph.nodes))
        return graph.forward

    norm, x = GroupNorm(3, 6), normal(2, 6, 4)
    call = torch.compile(norm, fullgraph=True, backend=backend)
    call(x)
    with pytest.warns(RuntimeWarning), broken(rungs.NATIVE):
        norm(x)
    call(x)
    assert graphs == [True, False]


def test_serving_a_module_does_not_recompile_the_users_code(ladder):
    norm, graphs = GroupNorm(3, 6), []
    call = torch.compile(norm, fullgraph=True, backend=lambda g, i: graphs.append(g) or g.forward)
    x = normal(2, 6, 4)
    call(x)
    norm(x)
    assert norm._served_by == (rungs.NATIVE,)
    call(x)
    assert len(graphs) == 1


# How much is compiled.


def test_sizes_strides_and_autocast_make_no_new_code(ladder):
    use_rung(rungs.COMPILED, ladder)
    graphs = []
    ladder.setattr(compiled, "BACKEND", lambda g, i: graphs.append(g) or g.forward)
    for n, width, height in itertools.product((2, 3), (12, 24), (4, 5, 7)):
        x = normal(n, width, height, 6)
        with torch.autocast("cpu", torch.bfloat16, enabled=height == 5):
            group_norm(x[..., ::2] if height == 7 else x, 4, torch.ones(width))
        assert steadynorm.last_rung() == rungs.COMPILED
    assert len(graphs) == 1


def test_kinds_of_calls_do_not_share_a_limit(ladder):
    use_rung(rungs.COMPILED, ladder)
    graphs = []
    ladder.setattr(compiled, "BACKEND", lambda g, i: graphs.append(g) or g.forward)
    kinds = list(itertools.product(("none", "relu"), (torch.float32, torch.bfloat16)))
    with torch._dynamo.config.patch(recompile_limit=1):
        for activation, dtype in kinds * 2:
            group_norm(normal(2, 6, 4), 3, activation=activation, out_dtype=dtype)
    assert len(graphs) == len(kinds)


def test_beyond_the_limits_the_formula_runs_uncompiled(ladder):
    use_rung(rungs.COMPILED, ladder)
    graphs = []
    ladder.setattr(compiled, "BACKEND", lambda g, i: graphs.append(g) or g.forward)
    ladder.setattr(compiled, "MAX_KINDS", len(compiled._kinds) + 1)
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in ((2, 6, 4), (1, 6, 4), (2, 6, 1), (2, 6, 4, 4)):  # sizes of 1, then another kind
            x = normal(*shape)
            expected = eager.group_norm(x, 3, None, None, 1e-5, "none", None)
            torch.testing.assert_close(group_norm(x, 3), expected, atol=1e-6, rtol=1e-6)
            assert steadynorm.last_rung() == rungs.COMPILED
    assert len(graphs) == 1
    assert compiled.rung.failure is None


# What a module carries.


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_been_served_by_nobody(ladder, duplicate):
    norm = GroupNorm(3, 6)
    keys = list(norm.state_dict()), set(vars(norm))
    norm(normal(2, 6, 4))
    assert norm._served_by == (rungs.NATIVE,)
    other = duplicate(norm)
    assert other._served_by == ()
    assert (list(other.state_dict()), set(vars(other))) == keys
    assert list(norm.state_dict()) == keys[0]


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_every_site_of_a_unet_keeps_dtype_and_format(ladder, name, autocast):
    use_rung(name, ladder)
    torch.manual_seed(0)
    net = UNet(8, 2, steady_norm).to(memory_format=torch.channels_last_3d)
    sites = norm_sites(net)
    given = {}

    def note(module, inputs):
        given[module] = inputs[0].dtype, measure.format_name(inputs[0])

    for _, module in sites:
        module.register_forward_pre_hook(note)
    census = measure.Census(sites, steadynorm.last_rung)
    x = laid_out(normal(1, 2, 8, 8, 8), "channels_last")
    with torch.autocast("cpu", autocast):
        scores = net(x)
    scores.float().square().mean().backward()
    census.close()
    if autocast == torch.bfloat16:  # a half convolution of the CPU is contiguous
        assert {format for _, format in given.values()} == {"channels_last_3d"}
    for row, (site, module) in zip(census.rows(), sites, strict=True):
        dtype, format = given[module]
        assert dtype == autocast
        out = {"out_dtype": measure.dtype_name(dtype), "memory_format": format}
        assert row == {"name": site, "rung": name} | out
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())


def test_info_tells_what_is_latched_and_why(ladder, capsys):
    with pytest.warns(RuntimeWarning), broken(rungs.NATIVE):
        GroupNorm(3, 6)(normal(2, 6, 4))
    steadynorm.set_rung("compiled", False)
    assert program.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"rung native: latched off: RuntimeError: {LAUNCH_FAILED}" in lines
    assert "rung compiled: off: turned off by set_rung" in lines
    assert "rung eager: on" in lines
    assert any(line.endswith(f": rung eager (RuntimeError: {LAUNCH_FAILED})") for line in lines)
