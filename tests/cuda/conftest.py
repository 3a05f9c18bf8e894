# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support"), str(Path(__file__).resolve().parent)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device and an operator library built for it")


def why_not() -> str | None:
    """Why tests marked gpu can't run here; None: they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    import steadynorm  # noqa: F401 (loads the operators)

    if not hasattr(torch.ops.steadynorm, "group_norm_forward"):
        return "the native library is not loaded"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("steadynorm::group_norm_forward", "CUDA"):
        return "the native library is built without CUDA"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := why_not()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def freed():
    """Leaves no cached memory to the next test, so that peaks are its own and large cases fit."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
