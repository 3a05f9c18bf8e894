# SPDX-License-Identifier: Apache-2.0
"""GroupNorm that keeps exact statistics, the caller's dtype and memory format, and the same bits every time.

`group_norm` and `GroupNorm` are drop-ins for `torch.nn.functional.group_norm` and `torch.nn.GroupNorm`.
`python -m steadynorm info` says what is built, `check` measures whether it is right here.
"""

from importlib import metadata as _metadata

from . import rungs as _rungs
from .convert import convert_group_norm, report
from .cooperative import set_cooperative
from .functional import MATCH_STOCK_DTYPE, group_norm
from .module import GroupNorm
from .rungs import last_rung, set_rung

_rungs.start(__path__)

try:
    __version__ = _metadata.version("steadynorm")
except _metadata.PackageNotFoundError:  # used from a source tree
    __version__ = str(_rungs.native.build.get("version", "0+unknown"))

__all__ = [
    "MATCH_STOCK_DTYPE",
    "GroupNorm",
    "__version__",
    "convert_group_norm",
    "group_norm",
    "last_rung",
    "report",
    "set_cooperative",
    "set_rung",
]
