# SPDX-License-Identifier: Apache-2.0
"""Loads the operator library, or says in one sentence why it can't be."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import batching
from .latch import sentence

LIBRARY = "libsteadynorm_torch.so"
PYTHON_ENTRY = "steadynorm_python"
BUILD_INFO = "build_info.json"

# CUDA's names for: this kernel can't be loaded or launched here.
LAUNCH_ERRORS = frozenset(
    f"cudaError{name}"
    for name in (
        "CooperativeLaunchTooLarge",
        "FunctionNotLoaded",
        "InsufficientDriver",
        "InvalidClusterSize",
        "InvalidConfiguration",
        "InvalidKernelImage",
        "InvalidPtx",
        "InvalidResourceHandle",
        "InvalidValue",
        "JitCompilationDisabled",
        "JitCompilerNotFound",
        "LaunchOutOfResources",
        "NotSupported",
        "SharedObjectInitFailed",
        "SharedObjectSymbolNotFound",
        "SymbolNotFound",
    )
)


@dataclass
class Native:
    """The operator library as it was found at import."""

    path: Path | None = None
    build: dict[str, Any] = field(default_factory=dict)  # what CMake wrote beside the library
    # When the library is loaded, steadynorm::group_norm and group_norm_residual: as tracers know them, and
    # the shortest way to the same from Python.
    traced: Callable[..., torch.Tensor] | None = None
    operator: Callable[..., torch.Tensor] | None = None
    traced_residual: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    residual_operator: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    reason: str | None = None  # why it isn't


def load(search_path: Iterable[str]) -> Native:
    """Loads the library from the `lib` folder of the first package folder that has one."""
    folders = [Path(entry) / "lib" for entry in search_path]
    folder = next((f for f in folders if (f / LIBRARY).is_file()), None)
    if folder is None:
        return Native(reason=f"{LIBRARY} is missing from {' and '.join(map(str, folders))}")
    native = Native(path=folder / LIBRARY)
    # Read before loading: a library for another torch may load and then crash.
    try:
        native.build = dict(json.loads((folder / BUILD_INFO).read_text(encoding="utf-8")))
        built_for = str(native.build["torch"])
    except FileNotFoundError:
        native.reason = f"{folder / BUILD_INFO} is missing, so the torch that {LIBRARY} needs is unknown"
    except (OSError, ValueError, KeyError, TypeError) as error:
        native.reason = f"{folder / BUILD_INFO} can't be read: {type(error).__name__}: {error}"
    else:
        if _minor(built_for) != _minor(torch.__version__):
            native.reason = f"{LIBRARY} was built for torch {built_for}, this is torch {torch.__version__}"
    if native.reason is None:
        try:
            torch.ops.load_library(str(native.path))
        except (OSError, RuntimeError) as error:
            cause = error.__cause__ or error  # the dynamic linker's own words
            native.reason = f"{LIBRARY} can't be loaded: {type(cause).__name__}: {cause}"
        else:
            batching.register()
            native.traced = torch.ops.steadynorm.group_norm.default
            native.operator = _shortest(folder, native.traced._op)
            native.traced_residual = torch.ops.steadynorm.group_norm_residual.default
            native.residual_operator = native.traced_residual._op
    return native


def _shortest(folder: Path, binding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What calls the operator without torch.ops' binding where it can, else that binding itself.

    The entry takes all seven arguments, by position. It is for any Python with the limited API, which a
    free-threaded one has not, and says itself when it knows this PyTorch's objects not.
    """
    if "t" in sys.abiflags:
        return binding
    spec = importlib.util.spec_from_file_location(PYTHON_ENTRY, folder / f"{PYTHON_ENTRY}.abi3.so")
    try:
        entry = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(entry)
    except ImportError:
        return binding
    return entry.bind(binding)


def why_not_on(native: Native, device: torch.device) -> str | None:
    """Why the loaded library can't serve tensors of `device`; None: it can."""
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        return f"the native library does not serve device type '{device.type}'"
    if not native.build.get("cuda"):
        return "the native library was built without CUDA"
    capability = torch.cuda.get_device_capability(device)
    architectures = [str(entry) for entry in native.build.get("cuda_architectures", [])]
    if not any(runs_on(entry, capability) for entry in architectures):
        return (
            f"the native library has no code for {torch.cuda.get_device_name(device)} "
            f"(sm_{capability[0]}{capability[1]}), it was built for {', '.join(architectures)}"
        )
    return None


def failure(error: Exception) -> str | None:
    """What an error of the operator says about this build on this device; None: nothing.

    The library's own NotImplementedError, and its RuntimeError "group_norm: ... failed with cudaError..."
    where the launch of a kernel was refused. Out of memory, an error that some earlier kernel left on the
    device, and whatever a hook raises are not in the list.
    """
    if not isinstance(error, RuntimeError) or not str(error).startswith("group_norm: "):
        return None
    device_error = re.match(r".* failed with (\w+): ", str(error))
    refused = device_error is not None and device_error[1] in LAUNCH_ERRORS
    return sentence(error) if refused or isinstance(error, NotImplementedError) else None


def declines(error: Exception) -> bool:
    """Whether an error says no more than: the operator has no kernel for this kind of tensor."""
    no_kernel = isinstance(error, (NotImplementedError, TypeError))
    # Of a __torch_function__ that knows it not, torch 2.11 says "torch.opssteadynorm.group_norm".
    return no_kernel and re.search(r"steadynorm(::|\.)group_norm", str(error)) is not None


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for a CMake CUDA architecture ("90", "90a", "90-real", "90-virtual") runs on a GPU."""
    match = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture)
    if match is None:
        return False
    built = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return built == capability
    same_family = built[0] == capability[0] and built <= capability
    has_ptx = match[3] == "" and match[4] != "-real"
    return same_family or (has_ptx and built <= capability)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
