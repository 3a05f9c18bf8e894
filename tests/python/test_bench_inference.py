# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench inference` on the CPU in small, its networks, and its part of the page."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import steadynorm
from helpers import layout_of, normal
from steadynorm import bench
from steadynorm.bench import inference, provenance, vae

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.page import __main__ as command_line  # noqa: E402
from bench.page import markdown, results  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread(native, set_threads) -> None:
    set_threads(1)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The video block alone: it takes milliseconds."""
    monkeypatch.setattr(inference, "networks", lambda size: [
        inference.Network("block", lambda: vae.video_block(8, 4), (1, 8, 2, 4, 4))
    ])  # fmt: skip


def run(tmp_path: Path, *options: str, status: int = 0) -> dict:
    path = tmp_path / "out.json"
    assert bench.main(["inference", "--device", "cpu", "--output", str(path), *options]) == status
    return json.loads(path.read_text())


def test_the_small_size_measures_both_networks_in_both_formats(tmp_path: Path, capsys) -> None:
    held = run(tmp_path, "--replicates", "6")
    assert (held["benchmark"], held["size"], held["replicates"], held["stopped"]) == (
        "inference",
        "small",
        6,
        None,
    )
    names = [(row["network"], row["layout"]) for row in held["rows"]]
    assert names == [
        (name, layout) for name in ("VAE decoder", "video VAE block") for layout in inference.LAYOUTS
    ]
    for row, (norms, fused) in zip(held["rows"], [(30, 29), (30, 29), (4, 4), (4, 4)], strict=True):
        assert (row["norms"], row["fused"], row["rungs"]) == (norms, fused, ["native"])
        stock, ours = (row["arms"][arm]["samples_ms"] for arm in ("stock", "ours"))
        assert len(stock) == len(ours) == 6
        assert row["saved_ms"] == pytest.approx((sum(stock) - sum(ours)) / 6, abs=1e-3)
        assert all(0 < of["error"] < 0.1 for of in row["arms"].values())
    told = capsys.readouterr()
    assert told.out.index("A trial run: this size proves nothing.") < told.out.index("stock - ours:")
    assert (
        "VAE decoder, 1x4x4x4, channels_last: 30 norms, 29 with their SiLU fused, served by native"
        in told.out
    )
    assert "[4/4] video VAE block, channels_last" in told.err


def test_the_full_size_is_a_decoder_to_1024_and_a_video_block() -> None:
    decoder, video = inference.networks(inference.FULL)
    seen = []
    with torch.device("meta"):
        model = decoder.make()
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                module.register_forward_pre_hook(
                    lambda norm, args: seen.append((norm.num_groups, *args[0].shape))
                )
        assert model(torch.empty(decoder.shape)).shape == (1, 3, 1024, 1024)
        assert video.make()(torch.empty(video.shape)).shape == video.shape == (1, 128, 20, 256, 256)
    assert len(seen) == 30
    assert seen[:5] == 5 * [(32, 1, 512, 128, 128)]
    assert [
        seen.count((32, 1, *shape)) for shape in ((512, 256, 256), (512, 512, 512), (256, 1024, 1024))
    ] == [6, 1, 1]
    assert seen[-1] == (32, 1, 128, 1024, 1024)


def test_a_causal_convolution_sees_no_later_frame() -> None:
    conv = vae.CausalConv3d(2, 3)
    x = normal(1, 2, 4, 5, 5)
    later = x.clone()
    later[:, :, 2:] += 1
    before, after = conv(x), conv(later)
    assert before.shape == (1, 3, 4, 5, 5)
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not torch.equal(before[:, :, 2:], after[:, :, 2:])


@pytest.mark.parametrize("layout", inference.LAYOUTS)
def test_both_arms_have_the_same_weights_in_the_format(layout: str) -> None:
    pair = inference.pair_of(inference.networks(inference.SMALL)[0], layout, "cpu")
    stock, ours = pair.models["stock"], pair.models["ours"]
    assert layout_of(pair.x) == layout
    assert not any(isinstance(m, steadynorm.GroupNorm) for m in stock.modules())
    for (name, a), (_, b) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.dtype, a.requires_grad) == (torch.bfloat16, False)
        assert torch.equal(a, b), name
        if a.dim() == 4 and a.shape[2] == 3:
            assert layout_of(a) == layout_of(b) == layout


def test_a_network_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    network = inference.networks(inference.SMALL)[1]
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = inference.pair_of(network, "contiguous", "cpu")
    assert torch.equal(torch.rand(1), expected)
    second = inference.pair_of(network, "contiguous", "cpu")
    assert torch.equal(first.models["stock"](first.x), second.models["stock"](second.x))


def test_the_error_is_the_difference_from_float32_over_its_largest_value() -> None:
    class Widened(nn.Module):
        """Twice x in float32; in bf16 one more than that."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x + (x.dtype == torch.bfloat16)

    off = nn.Module()
    off.forward = lambda x: 2 * x - 3
    pair = inference.Pair(
        {"stock": Widened(), "ours": off}, torch.tensor([1.0, -4.0]).bfloat16(), lambda: None
    )
    assert pair.errors() == {"stock": 1 / 8, "ours": 3 / 8}


def test_the_arms_take_turns_in_changing_order(blocks, monkeypatch) -> None:
    order = []
    monkeypatch.setattr(
        inference.Pair, "latency_ms", lambda self, arm: order.append(arm) or 1.0 + len(order) % 3
    )
    (network,) = inference.networks(inference.SMALL)
    row = inference.measure(network, "contiguous", "cpu", 6)
    warm = 2 * inference.WARM_UPS
    assert order[warm:] == 3 * ["stock", "ours", "ours", "stock"]
    assert len(row["arms"]["ours"]["samples_ms"]) == 6


def test_the_peak_is_what_a_forward_adds(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10 << 20)
    x = types.SimpleNamespace(device=torch.device("cuda"))
    called = []
    pair = inference.Pair({"ours": called.append}, x, lambda: None)
    assert (pair.peak_mib("ours"), called) == (7.0, [x])
    assert inference.Pair({}, torch.zeros(1), lambda: None).peak_mib("ours") is None


@pytest.mark.parametrize(
    ("saved", "half_width", "sentence"),
    [
        (2.0, 0.5, "stock - ours: 2.00 ± 0.50 ms, paired: ours is faster by 20 %"),
        (-2.0, 0.5, "stock - ours: -2.00 ± 0.50 ms, paired: ours is slower by 20 %"),
        (2.0, 2.5, "stock - ours: 2.0 ± 2.5 ms, paired: no difference is shown"),
    ],
)
def test_the_verdict_is_no_stronger_than_the_interval(saved: float, half_width: float, sentence: str) -> None:
    arms = {"stock": {"latency_ms": 10.0}, "ours": {"latency_ms": 10.0 - saved, "samples_ms": [0.0] * 6}}
    row = {"saved_ms": saved, "saved_half_width_ms": half_width, "arms": arms}
    assert inference.verdict(row) == sentence


def test_a_network_that_fails_is_left_out_and_the_next_is_measured(
    blocks, monkeypatch, tmp_path, capsys
) -> None:
    measure = inference.measure

    def short(network, layout: str, *rest) -> dict:
        if layout == "contiguous":
            raise torch.OutOfMemoryError("out of memory")
        return measure(network, layout, *rest)

    monkeypatch.setattr(inference, "measure", short)
    failed, row = run(tmp_path, status=1)["rows"]
    assert (failed["layout"], failed["error"]) == ("contiguous", "OutOfMemoryError: out of memory")
    assert row["layout"] == "channels_last"
    assert "block, contiguous: left out: OutOfMemoryError: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("stop", [SystemExit, MemoryError])
def test_each_row_is_in_the_file_as_soon_as_it_is_measured(blocks, monkeypatch, tmp_path, stop) -> None:
    measure, path = inference.measure, tmp_path / "out.json"

    def killed(network, layout: str, *rest) -> dict:
        if layout == "channels_last":
            held = json.loads(path.read_text())
            assert (len(held["rows"]), held["stopped"]) == (1, "not finished")
            raise stop
        return measure(network, layout, *rest)

    monkeypatch.setattr(inference, "measure", killed)
    if stop is MemoryError:
        assert run(tmp_path, status=1)["rows"][1]["error"] == "MemoryError: "
    else:
        with pytest.raises(SystemExit):
            run(tmp_path)


def test_a_termination_is_as_ctrl_c_and_the_handler_is_put_back(blocks, monkeypatch, tmp_path) -> None:
    def terminated(*_) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(inference, "measure", terminated)
    assert run(tmp_path, status=130)["stopped"] == "interrupted after 0 of 2"
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_writes_what_was_measured(blocks, monkeypatch, tmp_path, capsys) -> None:
    measure = inference.measure

    def interrupted(network, layout: str, *rest) -> dict:
        if layout == "channels_last":
            raise KeyboardInterrupt
        return measure(network, layout, *rest)

    monkeypatch.setattr(inference, "measure", interrupted)
    held = run(tmp_path, status=130)
    assert (len(held["rows"]), held["stopped"]) == (1, "interrupted after 1 of 2")
    assert "bench: interrupted after 1 of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--replicates 5", "--replicates: must be a whole number of at least 6, got '5'"),
        ("--device cuda", "--device: cuda needs a GPU that PyTorch can use, got none"),
        ("--output /no/x", "--output: must name a file that can be written, got '/no/x'"),
    ],
)
def test_bad_options_are_one_sentence_before_any_work(monkeypatch, capsys, arguments, sentence) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(inference, "measure", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as stopped:
        bench.main(["inference", *arguments.split()])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"bench: {sentence}\n"


def test_the_size_is_full_on_a_gpu_and_small_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert inference.parse(["--device", "cuda"]).size == "full"
    assert inference.parse(["--device", "cpu"]).size == "small"
    assert inference.parse(["--device", "cpu", "--size", "full"]).size == "full"


def test_only_a_full_run_in_a_checkout_goes_to_its_results(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "repository", lambda: tmp_path)
    name = "h200-inference.json"
    assert inference.place("NVIDIA H200", "full") == tmp_path / "bench" / "results" / name
    assert inference.place("NVIDIA H200", "small") == Path(name)
    monkeypatch.setattr(provenance, "repository", lambda: None)
    assert inference.place("NVIDIA H200", "full") == Path(name)


def test_a_repository_is_known_by_what_it_holds(monkeypatch, tmp_path: Path) -> None:
    assert provenance.repository() == ROOT
    monkeypatch.setattr(
        provenance, "__file__", str(tmp_path / "site" / "steadynorm" / "bench" / "provenance.py")
    )
    monkeypatch.chdir(tmp_path)
    assert provenance.repository() is None
    assert provenance.source() == {"commit": "unknown", "dirty": None}
    assert provenance.source("abc") == {"commit": "abc", "dirty": None}
    monkeypatch.chdir(ROOT)
    assert provenance.repository() == ROOT


def test_the_page_has_a_full_run_with_its_command_and_a_small_one_not(blocks, tmp_path: Path) -> None:
    held = run(tmp_path, "--commit", "0123456789abcdef")
    shutil.copy(ROOT / "README.md", tmp_path)
    folder = tmp_path / "bench" / "results"
    shutil.copytree(ROOT / "bench" / "results", folder, ignore=shutil.ignore_patterns("*-inference.json"))
    (folder / "small.json").write_text(json.dumps(held))
    full = {**copy.deepcopy(held), "size": "full", "device": "Some GPU", "date": "2026-01-02"}
    row = full["rows"][1]
    row.update(saved_ms=2.0, saved_half_width_ms=0.5, rungs=["eager"])
    row["arms"]["stock"].update(latency_ms=10.0, half_width_ms=0.25, peak_mib=12.3)
    (folder / "x-inference.json").write_text(json.dumps(full))
    found = results.read(folder)
    assert list(found.inference) == ["x-inference.json"]
    assert "small.json" in found.others
    assert "x-inference.json" not in found.others
    text = markdown.networks(found)
    assert "Some GPU, 2026-01-02, commit 0123456789" in text
    assert "python -m steadynorm bench inference --replicates 10`" in text
    cells = next(line for line in text.splitlines() if "channels_last" in line).split(" | ")
    assert cells[:6] == ["| block", "1×8×2×4×4", "channels_last", "**eager**", "4 (4)", "10.00 ± 0.25"]
    assert cells[7:11] == ["**2.00 ± 0.50**", "**20**", "12", "–"]
    page = tmp_path / "docs" / "performance.md"
    assert text in command_line.Page(tmp_path).texts[page]
    (folder / "x-inference.json").unlink()
    assert "## Networks" not in command_line.Page(tmp_path).texts[page]
