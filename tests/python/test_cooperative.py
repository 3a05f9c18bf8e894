# SPDX-License-Identifier: Apache-2.0
"""The switch for cooperative launches. What it changes on a GPU: tests/cuda."""

import pytest
import torch

import steadynorm


@pytest.mark.parametrize("value", [1, None, "on"])
def test_it_is_on_or_off(value: object) -> None:
    sentence = f"set_cooperative: on must be True or False, got {value!r}"
    with pytest.raises(ValueError) as raised:
        steadynorm.set_cooperative(value)
    assert str(raised.value) == sentence


def test_the_library_is_told(monkeypatch) -> None:
    told = []
    monkeypatch.setattr(torch.ops.steadynorm, "set_cooperative", told.append, raising=False)
    steadynorm.set_cooperative(True)
    steadynorm.set_cooperative(False)
    assert told == [True, False]


def test_a_library_without_cuda_has_nothing_to_be_told() -> None:
    if hasattr(torch.ops.steadynorm, "set_cooperative"):
        pytest.skip("the CUDA library is built")
    steadynorm.set_cooperative(True)
