# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm on a block of known forward whose one activation also serves its time embedding."""

import pickle

import pytest
import torch
from torch import nn

from convert_helpers import IMAGE, assert_computes_the_same, notes
from helpers import filled
from steadynorm import convert_group_norm, fusion


class TimeBlock(nn.Module):
    """Has the forward of a residual block of a diffusion model: one activation for norms and embedding."""

    def __init__(self, skip_time_act=False, time_embedding_norm="default", embeds=True):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(3, 3), nn.GroupNorm(1, 3)  # G = C would cancel the embedding
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
