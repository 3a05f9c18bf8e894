# SPDX-License-Identifier: Apache-2.0
"""convert_group_norm on models of diffusers, MONAI and timm with random weights (requirements/models.txt)."""

import copy

import pytest
import torch
from torch import nn

import steadynorm
from convert_helpers import assert_computes_the_same
from helpers import normal
from steadynorm import convert_group_norm


def package(name: str):
    reason = f"{name.split('.')[0]} is not installed (requirements/models.txt)"
    return pytest.importorskip(name, reason=reason)


def diffusers_unet():
    package("diffusers")
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def diffusers_unconditional_unet():
    package("diffusers")
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def diffusers_video_unet():
    package("diffusers")
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=8,
        norm_num_groups=4,
    )


def diffusers_temporal_block():
    package("diffusers")
    from diffusers.models.resnet import TemporalResnetBlock

    return TemporalResnetBlock(32, temb_channels=8)


def diffusers_vae():
    package("diffusers")
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=8,
    )


def monai_segresnet():
    return package("monai.networks.nets").SegResNet(
        init_filters=8, blocks_down=(1, 2), blocks_up=(1,), norm=("GROUP", {"num_groups": 4})
    )


def monai_unet():
    return package("monai.networks.nets").UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=1, act="RELU")


def monai_diffusion_unet():
    return package("monai.networks.nets").DiffusionModelUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(8, 8),
        attention_levels=(False, False),
        num_res_blocks=1,
        norm_num_groups=4,
    )


class EightGroups(nn.GroupNorm):
    def __init__(self, channels, **options):
        super().__init__(8, channels, **options)


def timm_resnet():
    return package("timm").create_model("resnet18", pretrained=False, num_classes=3, norm_layer=EightGroups)


def timm_resnet_with_its_own_norm():
    return package("timm").create_model("resnet18", pretrained=False, num_classes=3, norm_layer="groupnorm")


def denoise(model, x):
    return model(x, torch.full((2,), 7), normal(2, 3, 8, seed=2).to(x)).sample


# Each: the model, how it is called, its input's shape, and its sites: fused, converted without, left alone.
MODELS = {
    "diffusers-unet": (diffusers_unet, denoise, (2, 4, 8, 8), (17, 4, 0)),
    "diffusers-unconditional-unet": (
        diffusers_unconditional_unet,
        lambda m, x: m(x, torch.full((2,), 7)).sample,
        (2, 3, 8, 8),
        (17, 1, 0),
    ),
    "diffusers-video-unet": (diffusers_video_unet, denoise, (2, 4, 3, 8, 8), (49, 9, 0)),
    "diffusers-temporal-block": (
        diffusers_temporal_block,
        lambda m, x: m(x, normal(2, 3, 8, seed=2).to(x)),
        (2, 32, 3, 4, 4),
        (2, 0, 0),
    ),
    "diffusers-vae": (diffusers_vae, lambda m, x: m(x).sample, (2, 3, 16, 16), (22, 2, 0)),
    "monai-segresnet": (monai_segresnet, lambda m, x: m(x), (2, 1, 8, 8, 8), (9, 0, 0)),
    "monai-unet": (monai_unet, lambda m, x: m(x), (2, 1, 8, 8, 8), (6, 0, 0)),
    "monai-diffusion-unet": (
        monai_diffusion_unet,
        lambda m, x: m(x, torch.full((2,), 7)),
        (2, 1, 8, 8, 8),
        (17, 1, 0),
    ),
    "timm-resnet": (timm_resnet, lambda m, x: m(x), (2, 3, 32, 32), (0, 20, 0)),
    "timm-own-norm": (timm_resnet_with_its_own_norm, lambda m, x: m(x), (2, 3, 32, 32), (0, 0, 20)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_the_same(name):
    make, call, shape, counts = MODELS[name]
    torch.manual_seed(0)
    stock = make().eval()  # without dropout
    with torch.no_grad():
        for number, parameter in enumerate(stock.parameters()):
            parameter.add_(normal(*parameter.shape, seed=number + 5) / 10)  # none is 0 or 1 any more
    model = convert_group_norm(copy.deepcopy(stock))
    with steadynorm.report(model) as seen:
        call(model, normal(*shape))
    left_alone = [row for row in seen.rows if row.note.startswith("left alone")]
    unfused = [row for row in seen.rows if row.note.startswith("none")]
    fused = len(seen.rows) - len(unfused) - len(left_alone)
    assert (fused, len(unfused), len(left_alone)) == counts
    assert {row.rung for row in seen.rows} == ({"unknown"} if left_alone else {"native"})

    assert_computes_the_same(model, stock, normal(*shape), call)
    convert_group_norm(model, back=True)
    assert repr(model) == repr(stock)
    assert_computes_the_same(model, stock, normal(*shape), call)
