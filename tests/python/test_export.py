# SPDX-License-Identifier: Apache-2.0
"""torch.export and AOTInductor: the operator stays in the program, and the program needs its library."""

import io
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import steadynorm
from helpers import laid_out, layout_of, normal, use_rung
from steadynorm import rungs

BATCH = {0: torch.export.Dim("batch", min=1, max=64)}
CONSUMER = """
import sys, torch
library, package, inputs = sys.argv[1:]
x, expected = torch.load(inputs)
try:
    torch._inductor.aoti_load_package(package)
except RuntimeError as error:
    print("without:", str(error).splitlines()[0])
torch.ops.load_library(library)
y = torch._inductor.aoti_load_package(package)(x)
print("with:", torch.equal(y, expected), y.stride() == expected.stride(), "steadynorm" in sys.modules)
"""


def network(layout="contiguous"):
    torch.manual_seed(0)
    norm = steadynorm.GroupNorm(2, 8, activation="silu")
    nn.init.normal_(norm.weight)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 4, 3)).eval().requires_grad_(False)
    return model.to(memory_format=torch.channels_last) if layout == "channels_last" else model


def exported(model, layout="contiguous", **options):
    # 5 leaves a height of 1 after the second convolution, for which PyTorch makes a program of its own.
    sizes = BATCH | {2: torch.export.Dim("height", min=6, max=64)}
    x = laid_out(normal(2, 3, 8, 7), layout)
    return torch.export.export(model, (x,), dynamic_shapes=(sizes,), **options)


def operators(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("layout", "strict"), [("contiguous", False), ("channels_last", True)])
def test_export_keeps_the_operator_through_a_file(native, layout, strict):
    model = network(layout)
    program = exported(model, layout, strict=strict)
    assert operators(program) == [
        "aten.conv2d.default",
        "steadynorm.group_norm.default",
        "aten.conv2d.default",
    ]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    lowered = loaded.run_decompositions()
    assert "steadynorm.group_norm_forward.default" in operators(lowered)
    for size, height in ((1, 8), (2, 9), (5, 6)):
        x = laid_out(normal(size, 3, height, 7, seed=size), layout)
        for found in (loaded, lowered):
            y = found.module()(x)
            assert torch.equal(y, model(x))
            assert layout_of(y) == layout


def test_export_without_the_native_rung_has_pytorchs_operators_alone(monkeypatch):
    use_rung(rungs.EAGER, monkeypatch)
    model = network()
    program = exported(model).run_decompositions()
    assert "aten.native_group_norm.default" in operators(program)
    assert all(name.startswith(("aten.", "<built-in function")) for name in operators(program))
    x = normal(5, 3, 8, 7)
    torch.testing.assert_close(program.module()(x), model(x))  # silu is decomposed too


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="AOTInductor needs a C++ compiler"
)
def test_aot_inductor_runs_where_the_library_is_loaded_and_says_so_elsewhere(native, tmp_path):
    norm = network()[1].to(memory_format=torch.channels_last)
    x = laid_out(normal(2, 8, 5, 4), "channels_last")
    program = torch.export.export(norm, (x,), dynamic_shapes=(BATCH,))
    package, inputs = tmp_path / "norm.pt2", tmp_path / "inputs.pt"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    x = laid_out(normal(5, 8, 5, 4), "channels_last")
    torch.save((x, norm(x)), inputs)
    command = [sys.executable, "-c", CONSUMER, str(rungs.native.path), str(package), str(inputs)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    without, found = child.stdout.splitlines()
    assert without == "without: Could not find schema for steadynorm::group_norm_forward."
    assert found == "with: True True False"
