# SPDX-License-Identifier: Apache-2.0
"""The main job in examples/brain_unet: its parts, its messages, and a short run of the whole."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "brain_unet"
TINY = ["--device", "cpu", "--width", "8", "--depth", "2", "--size", "16", "--batch", "1"]


def part_of_demo(name: str):
    """A module of the demo, under a name that no other test's module has."""
    full = f"brain_unet_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


unet, data, measure = (part_of_demo(name) for name in ("model", "data", "measure"))


def command(*arguments) -> list[str]:
    return [sys.executable, str(FOLDER / "train.py"), *map(str, arguments)]


def environment(*first_on_path) -> dict[str, str]:
    path = os.pathsep.join([*map(str, first_on_path), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_demo(*arguments, path=(), cwd=ROOT):
    return subprocess.run(
        command(*arguments), env=environment(*path), cwd=cwd, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    done = run_demo(*TINY, "--steps", 12, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, json.loads((out / "report.json").read_text()), done.stdout


def test_report_json_has_what_is_promised(short_run):
    _, report, _ = short_run
    assert report["device"] == "cpu" and report["steps"] == 12 and not report["interrupted"]
    for arm in ("stock", "steadynorm"):
        values = report["arms"][arm]
        for key in ("loss_first", "loss_last", "dice", "step_ms_median", "peak_mib", "norm_ms"):
            assert isinstance(values[key], float), (arm, key)
        assert values["step_ms_q1"] <= values["step_ms_median"] <= values["step_ms_q3"]
        assert len(values["losses"]) == 12
    assert 0.9 < report["baseline_dice"] < 1
    assert report["beats_baseline"] == (report["arms"]["steadynorm"]["dice"] > report["baseline_dice"])
    assert report["split"]["gap"] >= report["split"]["receptive_field"]


def test_arms_start_from_the_same_weights_and_stay_together(short_run):
    _, report, _ = short_run
    assert report["max_rel_loss_gap"] <= 1e-2


def test_every_site_of_our_arm_is_native_bfloat16_and_channels_last(short_run):
    _, report, _ = short_run
    want = {"out_dtype": "bfloat16", "memory_format": "channels_last_3d", "rung": "native"}
    names = [name for name, _ in unet.norm_sites(unet.UNet(8, 2, unet.stock_norm))]
    assert report["sites"] == [{"name": name, **want} for name in names]
    assert report["sites_off_target"] == []
    assert [site["name"] for site in report["stock_sites"]] == names


def test_pictures_and_page_stand_alone(short_run):
    out, report, _ = short_run
    split = all(arm["rest_ms"] is not None for arm in report["arms"].values())  # not on a busy machine
    names = ["loss.png", "slice.png"] + ["step_time.png"] * split
    for name in names:
        assert (out / name).read_bytes().startswith(b"\x89PNG"), name
    page = (out / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(names)
    assert "<link" not in page and "<script" not in page and 'src="http' not in page


def test_terminal_shows_source_notice_table_and_baseline(short_run):
    _, report, text = short_run
    for words in ("ICBM 2009a", "without fee", "ms a step, quartiles", "peak MiB", "rung"):
        assert words in text, words
    assert f"{report['baseline_dice']:.4f}" in text


def test_interrupt_writes_the_report_so_far_and_exits_130(tmp_path):
    process = subprocess.Popen(
        command(*TINY, "--steps", 100000, "--out", tmp_path),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.startswith("device"):
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] is True and 1 <= report["steps"] < 100000
    assert report["arms"]["steadynorm"]["dice"] is None and report["beats_baseline"] is None
    assert (tmp_path / "report.html").is_file() and (tmp_path / "loss.png").is_file()


def test_state_dicts_of_both_arms_have_the_same_keys_and_load_into_each_other():
    stock, ours = unet.UNet(8, 3, unet.stock_norm), unet.UNet(8, 3, unet.steady_norm)
    assert list(stock.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    assert all(isinstance(site, nn.GroupNorm) for _, site in unet.norm_sites(ours))


def test_both_arms_compute_the_same_function():
    torch.manual_seed(0)
    stock, ours = unet.UNet(8, 2, unet.stock_norm), unet.UNet(8, 2, unet.steady_norm)
    ours.load_state_dict(stock.state_dict())
    x = unet.channels_last_input(torch.randn(1, 8, 8, 8, 2))
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_receptive_field_is_what_gradients_reach(depth):
    net = unet.UNet(8, depth, lambda channels: (nn.Identity(), nn.Identity()))
    net.pool = nn.AvgPool3d(2)  # a maximum would pass its gradient to one voxel only
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1e-3)
    grid = 2 ** (depth - 1)
    widest = 0
    x = torch.ones(1, 2, 256, grid, grid, dtype=torch.float64, requires_grad=True)
    y = net.double()(x)
    for voxel in range(128, 128 + grid):
        (dx,) = torch.autograd.grad(y[:, :, voxel].sum(), x, retain_graph=True)
        reached = dx.abs().amax((0, 1, 3, 4)).nonzero().flatten()
        widest = max(widest, int(reached[-1] - reached[0]) + 1)
    assert unet.receptive_field(depth) == widest


@pytest.mark.parametrize("size, depth", [(16, 2), (32, 3), (64, 3), (40, 4)])
def test_parts_lie_a_receptive_field_apart_and_hold_a_patch(size, depth):
    gap = unet.receptive_field(depth)
    brain = data.load_brain(size, gap)
    assert brain.valid.start - brain.train.stop >= gap
    for part in (brain.train, brain.valid):
        assert min(part.t1.shape) >= size and part.t1.shape == part.labels.shape
        assert set(np.unique(part.labels)) == {0, 1, 2}
    patches = data.Patches(brain, size, 2, seed=3)
    again = data.Patches(brain, size, 2, seed=3)
    images, labels = patches.next()
    assert images.shape == (2, size, size, size, 2) and labels.shape == (2, size, size, size)
    assert images.min() >= 0 and images.max() <= 2
    assert torch.equal(images, again.next()[0])


def test_labels_take_the_most_probable_tissue():
    gm, wm = np.array([[[0, 200, 20, 100]]], np.uint8), np.array([[[0, 30, 220, 100]]], np.uint8)
    assert data.tissue_labels(gm, wm).tolist() == [[[0, 1, 2, 1]]]


def test_thresholds_are_the_best_pair():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=(8, 8, 8)).astype(np.uint8)
    t1 = np.clip(labels * 80 + rng.normal(30, 25, labels.shape), 0, 255).astype(np.uint8)
    part = data.Part(0, 8, t1, labels)

    def dice(pair):
        return data.dice_scores(data.threshold_classes(t1, pair), labels)["mean"]

    best = max(dice((a, b)) for a in range(0, 256, 5) for b in range(a, 256, 5))
    assert dice(data.fit_thresholds(part)) >= best


def test_a_split_that_a_busy_machine_makes_impossible_is_left_out():
    assert measure.rest_ms({"median": 10.0}, 4.0) == 6.0
    assert measure.rest_ms({"median": 10.0}, 11.0) is None
    assert measure.rest_ms(None, 4.0) is None


def test_loss_gap_is_taken_between_running_means_of_ten():
    stock, ours = [1.0] * 20, [1.0] * 10 + [1.1] + [1.0] * 9
    assert measure.max_relative_gap(stock, ours) == pytest.approx(0.01)
    assert measure.max_relative_gap([], []) is None


def fake_nilearn(folder: Path) -> Path:
    """A package of nilearn's name with a copy of the three maps."""
    target = folder / "nilearn" / "datasets" / "data"
    target.mkdir(parents=True)
    (folder / "nilearn" / "__init__.py").write_text("raise ImportError('located, not imported')\n")
    for path in data.data_folder().glob("mni_icbm152_*.nii.gz"):
        shutil.copy(path, target)
    return target


def cut_short(path: Path):
    path.write_bytes(path.read_bytes()[:100_000])


def flip_a_byte(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def other_content(path: Path):
    path.write_bytes(b"version of a large file, kept elsewhere\n")


@pytest.mark.parametrize("damage", [Path.unlink, cut_short, flip_a_byte, other_content])
def test_missing_or_damaged_map_is_named_with_what_to_do(tmp_path, damage):
    folder = fake_nilearn(tmp_path)
    path = next(folder.glob("*_gm_*"))
    damage(path)
    with pytest.raises(data.DataError) as error:
        data.load_brain(16, 18, folder)
    word = "is missing" if damage is Path.unlink else "is damaged"
    assert str(path) in str(error.value) and word in str(error.value)
    assert "pip install --force-reinstall" in str(error.value)


def test_damaged_map_ends_the_program_before_training_with_status_2(tmp_path):
    cut_short(next(fake_nilearn(tmp_path).glob("*_t1_*")))
    done = run_demo(*TINY, "--out", tmp_path / "out", path=[tmp_path])
    assert done.returncode == 2
    assert "is damaged" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "report.json").exists()


BAD_OPTIONS = [
    (["--steps", "0"], "argument --steps: expected an integer of at least 1, got 0"),
    (["--steps", "many"], "argument --steps: expected an integer of at least 1, got many"),
    (["--width", "12"], "argument --width: expected a positive multiple of 8, got 12"),
    (["--depth", "5"], "argument --depth: expected 2, 3 or 4, got 5"),
    (["--size", "30"], "expected a multiple of 4 of at least 8 at depth 3, got 30"),
    (["--size", "96"], "expected at most 68 at a receptive field of 44 voxels, got 96"),
    (["--device", "toaster"], "argument --device: expected cpu, cuda or cuda:N, got toaster"),
    (["--device", "cuda:99"], "argument --device: expected a device that PyTorch sees"),
    (["--seed", "-1"], "argument --seed: expected an integer from 0 to 2**32 - 1, got -1"),
    (["--out", "/dev/null/x"], "argument --out: expected a folder that can be written to"),
    (["--colour", "red"], "unrecognized arguments: --colour red"),
]


@pytest.mark.parametrize("arguments, sentence", BAD_OPTIONS, ids=range(len(BAD_OPTIONS)))
def test_bad_option_gets_one_sentence_and_status_2(tmp_path, arguments, sentence):
    out = [] if "--out" in arguments else ["--out", tmp_path]
    done = run_demo(*arguments, *out, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("**/report.*"))


def test_help_lists_every_option(tmp_path):
    done = run_demo("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("steps", "width", "depth", "size", "batch", "device", "out", "seed"):
        assert f"--{name}" in done.stdout
    assert "130" in done.stdout


@pytest.mark.parametrize(
    ("there", "device", "width", "size"), [(True, "cuda", 32, 64), (False, "cpu", 16, 32)]
)
def test_a_gpu_is_used_where_there_is_one(there, device, width, size, monkeypatch, tmp_path):
    options = part_of_demo("options")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    chosen = options.parse_options(["--out", str(tmp_path)])
    assert (chosen.device.type, chosen.width, chosen.size) == (device, width, size)
