# SPDX-License-Identifier: Apache-2.0
"""steadynorm.report: the table, what it notes of calls, and that it leaves nothing behind."""

import pytest
import torch
from torch import nn

import steadynorm
from convert_helpers import IMAGE, OwnForward, network
from steadynorm import convert_group_norm, fusion


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
        "site  module      shape         dtype     rung     activation",
        "1     GroupNorm   [2, 8, 7, 6]  bfloat16  native   silu",
        "3     OwnForward  [2, 8, 7, 6]  float32   unknown  left alone: its class OwnForward defines forward",
        "4.x   GroupNorm   not seen                         not converted",
    ]
    row = seen.rows[0]
    assert (row.site, row.module, row.note) == ("1", "GroupNorm", "silu")
    assert (row.shape, row.dtype, row.rung) == ((2, 8, 7, 6), "bfloat16", "native")


def test_the_report_tells_the_rung_and_a_changed_dtype(rung):
    norm = convert_group_norm(nn.GroupNorm(1, 3))
    with steadynorm.report(norm) as seen:
        norm(input=IMAGE)
    assert seen.rows[0].rung == rung
    norm.forward = lambda *, x: x.double()
    with steadynorm.report(norm) as seen:
        norm(x=IMAGE)
    assert (seen.rows[0].rung, seen.rows[0].dtype) == ("unknown", "float32 -> float64")


def test_the_report_tells_stock_and_names_the_model_itself():
    norm = nn.InstanceNorm2d(3, track_running_stats=True)
    with steadynorm.report(norm) as seen:
        norm(IMAGE)
    assert repr(seen).splitlines() == [
        "site     module          shape         dtype    rung   activation",
        "(model)  InstanceNorm2d  [2, 3, 9, 8]  float32  stock  left alone: it keeps running statistics",
    ]


def test_the_report_bears_a_forward_without_tensors():
    norm = nn.GroupNorm(1, 3)
    norm.forward = lambda: (1, 2)
    with steadynorm.report(norm) as seen:
        assert norm() == (1, 2)
    assert seen.rows[0].shape is None


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
