# SPDX-License-Identifier: Apache-2.0
# placeholder
import pathlib
from importlib.metadata import version

import torch

__version__ = version("steadynorm")
torch.ops.load_library(pathlib.Path(__file__).parent / "lib" / "libsteadynorm_torch.so")
