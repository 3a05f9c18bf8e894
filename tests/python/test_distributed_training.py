# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel and FSDP2 on two processes, one of whose native rung fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

import steadynorm

pytestmark = [
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="this torch has no gloo",
    ),
]

# One rank: rank, file of the rendezvous, "ddp" or "fsdp". Rank 1 fails once, in its second step.
CHILD = """
import json, os, sys, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
import steadynorm
from steadynorm import rungs

rank, rendezvous, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
torch.manual_seed(0)
norm = steadynorm.GroupNorm(4, 8, activation="relu")
model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 1, 3))
rows = []
norm.register_forward_hook(lambda module, x, y: rows.append([
    str(x[0].dtype), str(y.dtype), y.is_contiguous(memory_format=torch.channels_last), steadynorm.last_rung(),
]))
if kind == "ddp":
    net = DistributedDataParallel(model)
else:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    net = model
optimizer = torch.optim.SGD(net.parameters(), 0.1)
x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(rank))
x = x.to(memory_format=torch.channels_last)
losses, gradients = [], []

def broken(*_):
    raise RuntimeError("group_norm: the apply kernel failed with cudaErrorInvalidConfiguration: injected")

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

rungs.ladder["compiled"].turn(False, by="the test")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(4):
        sound = rungs.native.operator
        if rank == 1 and step == 1:
            rungs.native.operator = broken
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "ddp"):
            y = net(x)
        loss = (y.float() - 1).square().mean()
        loss.backward()
        rungs.native.operator = sound
        gradients.append([whole(p.grad).double().flatten().tolist() for p in net.parameters()])
        optimizer.step()
        losses.append(float(loss.detach()))
late = steadynorm.GroupNorm(4, 8)
late(torch.zeros(1, 8, 3))
ours = [str(w.message) for w in caught if str(w.message).startswith("steadynorm")]
print(json.dumps({
    "rows": rows, "losses": losses, "gradients": gradients, "warnings": len(ours),
    "late": steadynorm.last_rung(),
    "dtypes": sorted({str(p.grad.dtype) for p in net.parameters()}),
}))
dist.barrier()
dist.destroy_process_group()
# At the end of the interpreter gloo's threads may still run, which aborts the process (torch 2.11, once).
sys.stdout.flush()
os._exit(0)
"""


def train(folder: Path, kind: str) -> list[dict]:
    package = str(Path(steadynorm.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(folder / "rendezvous"), kind],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        found = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, found, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(output) for output, _ in found]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_fell_back_trains_on(tmp_path, kind):
    """ddp under autocast, fsdp with its own mixed precision: bf16 activations, fp32 gradients."""
    first, second = train(tmp_path, kind)
    for rank in (first, second):
        assert {tuple(row[:3]) for row in rank["rows"]} == {("torch.bfloat16", "torch.bfloat16", True)}
        assert rank["dtypes"] == ["torch.float32"]
        assert rank["losses"][-1] < rank["losses"][0]
    assert [row[3] for row in first["rows"]] == ["native"] * 4
    assert [row[3] for row in second["rows"]] == ["native", "eager", "native", "native"]
    assert (first["late"], second["late"]) == ("native", "eager")
    assert (first["warnings"], second["warnings"]) == (0, 1)
    assert first["gradients"] == second["gradients"]
    assert any(abs(value) > 0 for value in first["gradients"][1][2])
