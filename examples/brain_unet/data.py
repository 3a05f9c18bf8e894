# SPDX-License-Identifier: Apache-2.0
"""The MNI152 T1 template with its tissue maps, cut into a training and a validation part."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

TISSUES = ("other", "grey matter", "white matter")
MAPS = ("t1", "gm", "wm")
CONTRAST = 12.0  # grey values from a threshold to 76 % of the contrast
SHAPE = (197, 233, 189)  # left to right, back to front, bottom to top; 1 mm voxels

SOURCE = """\
data    ICBM 2009a nonlinear symmetric template (MNI152): T1, grey and white matter maps, 1 mm,
        as carried by the nilearn wheel
        https://www.bic.mni.mcgill.ca/ServicesAtlases/ICBM152NLin2009
notice  Copyright (C) 1993-2009 Louis Collins, McConnell Brain Imaging Centre, Montreal Neurological
        Institute, McGill University. Permission to use, copy, modify, and distribute this software
        and its documentation for any purpose and without fee is hereby granted, provided that the
        above copyright notice appear in all copies. Provided "as is", without warranty."""

REPAIR = "pip install --force-reinstall --no-deps -r requirements/demo-data.txt"


class DataError(Exception):
    """A data file is missing or damaged; the message names it and says what to do."""


def data_folder() -> Path:
    """Where nilearn keeps its maps. nilearn is located, not imported: its imports need more
    packages (scikit-learn, pandas) than the demo installs."""
    spec = importlib.util.find_spec("nilearn")
    if spec is None or spec.origin is None:
        raise DataError(f"the package nilearn, which carries the brain maps, is missing: {REPAIR}")
    return Path(spec.origin).parent / "datasets" / "data"


def read_map(folder: Path, kind: str) -> np.ndarray:
    """One map as `uint8[197, 233, 189]`; kind is t1, gm or wm."""
    import nibabel

    path = folder / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz"
    if not path.is_file():
        raise DataError(f"the data file {path} is missing; install it again: {REPAIR}")
    try:
        # Unpacked whole: nibabel.load stops before gzip's checksum, and lets wrong voxels pass.
        content = gzip.decompress(path.read_bytes())
        volume = np.asarray(nibabel.Nifti1Image.from_bytes(content).dataobj)
    except (OSError, EOFError, ValueError, zlib.error, nibabel.filebasedimages.ImageFileError) as e:
        why = " ".join(str(e).split()) or type(e).__name__
        what = f"the data file {path} is damaged ({why})"
        raise DataError(f"{what}; install it again: {REPAIR}") from e
    if volume.shape != SHAPE or volume.dtype != np.uint8 or volume.max() == 0:
        raise DataError(
            f"the data file {path} must hold {SHAPE} uint8 voxels that are not all zero, got "
            f"{volume.shape} {volume.dtype} up to {volume.max()}; install it again: {REPAIR}"
        )
    return volume


@dataclass(frozen=True)
class Part:
    """A slab of the volume from `start` to `stop` along the back-to-front axis."""

    start: int
    stop: int
    t1: np.ndarray  # uint8[X, stop - start, Z]
    labels: np.ndarray  # uint8[X, stop - start, Z], an index into TISSUES


@dataclass(frozen=True)
class Brain:
    train: Part  # the back
    valid: Part  # the front
    gap: int  # voxels between them
    thresholds: tuple[int, int]  # of T1, fitted on the training part

    def windowed(self, t1: np.ndarray) -> torch.Tensor:
        """T1 as `float32[..., 2]`: the contrast around each threshold, from 0 to 2.

        Taken as it is, air would lie seven deviations of tissue away from tissue, and its share
        of a patch would set the scale of every normalisation. Here it becomes 0, which is also
        what the convolutions pad with.
        """
        x = torch.from_numpy(t1.astype(np.float32))[..., None]
        return 1 + torch.tanh((x - torch.tensor(self.thresholds)) / CONTRAST)


def tissue_labels(gm: np.ndarray, wm: np.ndarray) -> np.ndarray:
    """The most probable of other, grey and white; the maps hold probabilities times 255."""
    gm, wm = gm.astype(np.int16), wm.astype(np.int16)
    return np.argmax(np.stack((255 - gm - wm, gm, wm)), axis=0).astype(np.uint8)


def load_brain(size: int, gap: int, folder: Path | None = None) -> Brain:
    """Read the maps and split them: the front for validation, then `gap`, the back for training.

    The template is left-right symmetric, so a left-right split would validate on a mirror image
    of the training data. `size` is the patch edge, which must fit into both parts.
    """
    folder = folder or data_folder()
    t1, gm, wm = (read_map(folder, kind) for kind in MAPS)
    labels = tissue_labels(gm, wm)
    box = []  # where there is tissue
    for axis in range(3):
        inside = np.flatnonzero((labels > 0).any(axis=tuple({0, 1, 2} - {axis})))
        box.append((int(inside[0]), int(inside[-1]) + 1))
    (x0, x1), (back, front), (z0, z1) = box
    room = front - back - gap  # the longest of the three axes, and the one that is shared
    if 2 * size > room:
        raise ValueError(
            "--size must leave room for two parts with the receptive field between them: expected "
            f"at most {max(room // 2, 0)} at a receptive field of {gap} voxels, got {size}"
        )
    cut = front - max(size, min((front - back) // 4, room - size))
    parts = [
        Part(a, b, t1[x0:x1, a:b, z0:z1], labels[x0:x1, a:b, z0:z1])
        for a, b in ((back, cut - gap), (cut, front))
    ]
    brain = Brain(*parts, gap, fit_thresholds(parts[0]))
    assert brain.valid.start - brain.train.stop >= gap
    return brain


class Patches:
    """Random cubes of the training part, each with a random tissue voxel somewhere inside; the
    order is a function of the seed alone.

    None is all air: over a constant a normalisation's gradient is 1 / sqrt(eps) = 316 times the
    incoming one, at every level, and one such cube undoes what many others taught.
    """

    def __init__(self, brain: Brain, size: int, batch: int, seed: int):
        self.image = brain.windowed(brain.train.t1)
        self.labels = torch.from_numpy(brain.train.labels.astype(np.int64))
        self.tissue = np.argwhere(brain.train.labels > 0)
        self.size, self.batch = size, batch
        self.rng = np.random.default_rng(seed)

    def start(self) -> np.ndarray:
        """The corner of one cube."""
        voxel = self.tissue[self.rng.integers(len(self.tissue))]
        inside = self.rng.integers(self.size, size=3)
        return np.clip(voxel - inside, 0, np.array(self.labels.shape) - self.size)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images `float32[batch, size, size, size, 2]`, labels `int64[batch, size, size, size]`."""
        images, labels = [], []
        for _ in range(self.batch):
            cube = tuple(slice(int(s), int(s) + self.size) for s in self.start())
            images.append(self.image[cube])
            labels.append(self.labels[cube])
        return torch.stack(images), torch.stack(labels)


def window_starts(length: int, size: int, step: int) -> list[int]:
    """Starts of windows that cover `length`, the last one flush with the end."""
    return [*range(0, length - size, step), length - size]


def dice_scores(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Dice of grey and of white matter, and their mean."""
    scores = []
    for c in (1, 2):
        p, t = predicted == c, truth == c
        scores.append(2.0 * float((p & t).sum()) / max(1.0, float(p.sum() + t.sum())))
    return {"grey": scores[0], "white": scores[1], "mean": sum(scores) / 2}


def fit_thresholds(part: Part) -> tuple[int, int]:
    """The pair a <= b of the best mean Dice for: T1 < a other, a <= T1 < b grey, else white.

    Exhaustive over all pairs, through counts below each grey value.
    """
    below = [
        np.concatenate(([0], np.bincount(part.t1[part.labels == c], minlength=256).cumsum()))
        for c in range(3)
    ]  # below[c][v]: voxels of class c whose T1 is < v
    n_all, (n_grey, n_white) = sum(below), (below[1], below[2])
    a, b = np.arange(257)[:, None], np.arange(257)[None, :]
    grey = 2 * (n_grey[b] - n_grey[a]) / np.maximum(1, n_all[b] - n_all[a] + n_grey[-1])
    white = 2 * (n_white[-1] - n_white) / np.maximum(1, n_all[-1] - n_all + n_white[-1])
    score = np.where(a <= b, grey + white[None, :], -1.0)
    best = np.unravel_index(int(score.argmax()), score.shape)
    return int(best[0]), int(best[1])


def threshold_classes(t1: np.ndarray, thresholds: tuple[int, int]) -> np.ndarray:
    return np.digitize(t1, thresholds).astype(np.uint8)
