# SPDX-License-Identifier: Apache-2.0
"""Turns the norms of a model into ours and back, in place, and reports what became of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import fusion, instance_norm, rungs
from .fusion import Fusion
from .module import GroupNorm

OURS = {
    nn.GroupNorm: GroupNorm,
    nn.InstanceNorm1d: instance_norm.InstanceNorm1d,
    nn.InstanceNorm2d: instance_norm.InstanceNorm2d,
    nn.InstanceNorm3d: instance_norm.InstanceNorm3d,
}
STOCK = {ours: stock for stock, ours in OURS.items()}
LAZY = (nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d)


def convert_group_norm(model: nn.Module, fuse_activations: bool = True, *, back: bool = False) -> nn.Module:
    """Makes every GroupNorm of a model a `steadynorm.GroupNorm`, in place, and InstanceNorm likewise.

    A converted module is the same object with another class: its parameters, state-dict keys, hooks, device,
    dtype and flags stay, so do optimizers and other references to it. `nn.InstanceNorm1d`, `2d` and `3d`
    without running statistics get a subclass of theirs that `steadynorm.group_norm` serves, for batched and
    unbatched input. Converting twice changes nothing more.

    Left alone, with the reason in `steadynorm.report`: subclasses that define more than `__init__`, norms
    with a forward of their own, parametrised or lazy ones, InstanceNorm with running statistics, and norms
    inside a ScriptModule.

    Args:
        model (torch.nn.Module): changed in place; may be a norm itself.
        fuse_activations (bool): also fuse a ReLU, SiLU or GELU (exact or tanh) module into the norm that it
            provably follows with nothing else reading in between: in an `nn.Sequential`, in a block of
            diffusers or MONAI that is known, or by the torch.fx graph of a forward without branches. An
            `nn.Identity` takes its place there; the same activation elsewhere stays. Never where the norm
            is used at several places, the activation has parameters, buffers or modules, or another reader
            may see the two: hooks on one of them or on all modules, forward hooks on a module around them,
            an attribute that holds one of them besides the parent's child. Default: True.
        back (bool): the reverse: stock classes and the activations are put back where they were. A norm has
            no place to put its activation, and is left alone, where it was made with one, or the module that
            it was fused in is not part of `model` or shares it with another one. Default: False.

    Returns:
        torch.nn.Module: `model` itself.

    Raises:
        ValueError: `model` is no module.

    Convert before or after `torch.compile`, DDP, moving and loading, and before `torch.jit.trace`.
    `torch.jit.script` refuses a converted model.

    Example:
        >>> import torch, steadynorm
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU())
        >>> steadynorm.convert_group_norm(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): GroupNorm(4, 8, eps=1e-05, affine=True, activation=silu)
          (2): Identity()
        )
        >>> steadynorm.convert_group_norm(model, back=True)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): GroupNorm(4, 8, eps=1e-05, affine=True)
          (2): SiLU()
        )
    """
    _check_model("convert_group_norm", model)
    if back:
        _unfuse(model)
        for module in model.modules():
            if type(module) in STOCK and module.activation == "none":
                module.__class__ = vars(module).pop("stock_class", STOCK[type(module)])
        return model
    sites = find_sites(model)
    for site in sites:
        if site.refusal is None and type(site.module) not in STOCK:
            _make_ours(site.module)
    if fuse_activations:
        for found in dict.fromkeys(site.fusion for site in sites if site.fusion is not None):
            _fuse(found)
    return model


def report(model: nn.Module) -> Report:
    """A printable table of a model's norms: what serves each, and which activation is fused or why none is.

    In a `with` statement it also notes what each norm's last call inside it saw: input shape, dtype (and the
    output's where it differs) and rung ("stock" for stock's own forward, "unknown" for any other). Calls in
    compiled code are not noted.

    Args:
        model (torch.nn.Module): converted or not; it isn't changed.

    Returns:
        Report: prints as the table. Its `rows` have the same as attributes: `site` (dotted name, "" for the
        model itself), `module` (class name), `shape`, `dtype` and `rung` (None where not seen) and `note`.

    Raises:
        ValueError: `model` is no module.

    Example:
        >>> import torch, steadynorm
        >>> from torch import nn
        >>> model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.GroupNorm(1, 8), nn.Dropout(0.1))
        >>> with steadynorm.report(steadynorm.convert_group_norm(model)) as seen:
        ...     y = model(torch.randn(2, 8, 5, 5))
        >>> seen
        site  module     shape         dtype    rung    activation
        0     GroupNorm  [2, 8, 5, 5]  float32  native  silu
        2     GroupNorm  [2, 8, 5, 5]  float32  native  none: Dropout follows
    """
    _check_model("report", model)
    return Report(model)


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


# --- Where the norms are --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A norm of a model, at the first of its places."""

    name: str
    module: nn.Module
    refusal: str | None = None  # why it is left alone
    fusion: Fusion | None = None  # what can be fused into it
    unfused: str | None = None  # why nothing can; None also where an activation is fused


def find_sites(model: nn.Module) -> list[Site]:
    norms = {name: module for name, module in model.named_modules() if _is_norm(module)}
    refusals = {id(module): _why_left_alone(module) for module in norms.values()}
    parents = _parents(model)
    watched = {
        child: f"the {type(module).__name__} around it has hooks"
        for module in model.modules()
        if fusion.has_forward_hooks(module)
        for child in module.modules()
    }
    held = fusion.held_elsewhere(model)
    answers: fusion.Answers = {}
    fusible: dict[int, tuple[nn.Module, list[nn.Module]]] = {}
    for module in norms.values():
        above = parents.get(module, [])
        if fusion.has_hooks(module):
            answers[id(module)] = "the norm has hooks"
        elif fusion.has_global_hooks():
            answers[id(module)] = "hooks of all modules are registered"
        elif module in watched:
            answers[id(module)] = watched[module]
        elif module in held:
            answers[id(module)] = f"{held[module]} holds it too"
        elif len(above) != 1:
            answers[id(module)] = f"it is used at {len(above)} places" if above else "it is the model itself"
        elif refusals[id(module)] is None and _activation(module) == "none":
            fusible.setdefault(id(above[0]), (above[0], []))[1].append(module)
    for parent, children in fusible.values():
        for norm, found in fusion.find(parent, children).items():
            if isinstance(found, Fusion) and found.module in held:
                found = f"{held[found.module]} holds the {type(found.module).__name__} that follows too"
            answers[norm] = found

    sites = []
    for name, module in norms.items():
        refusal, answer = refusals[id(module)], answers.get(id(module))
        if refusal is not None or _activation(module) != "none":
            answer = None
        fused = answer if isinstance(answer, Fusion) else None
        sites.append(Site(name, module, refusal, fused, answer if isinstance(answer, str) else None))
    return sites


def _parents(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The module that has each one as a child, once for each place."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for parent in model.modules():
        for child in parent._modules.values():
            if child is not None:
                parents.setdefault(child, []).append(parent)
    return parents


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name in {cls.__name__ for cls in OURS}
    return isinstance(module, (*OURS, *LAZY))


def _activation(module: nn.Module) -> str:
    return getattr(module, "activation", "none") if type(module) in STOCK else "none"


def _why_left_alone(module: nn.Module) -> str | None:
    """Why a norm can't be ours; None: it can, or is."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    if isinstance(module, LAZY):
        return "it is lazy: run a batch before"
    if any(
        getattr(module, name, None) is not None and module._parameters.get(name) is None
        for name in ("weight", "bias")
    ):
        return "it is parametrised: its weight or bias is no plain parameter"
    if cls not in STOCK:
        stock = next(base for base in cls.__mro__ if base in OURS)
        name = fusion.defined_beyond(cls, stock)
        if name is not None:
            return f"its class {cls.__name__} defines {name}"
    if "forward" in vars(module):
        return "it has a forward of its own"
    if getattr(module, "track_running_stats", False):
        return "it keeps running statistics"
    return None


# --- Changing them --------------------------------------------------------------------------------------


def _make_ours(module: nn.Module) -> None:
    cls = type(module)
    stock = next(base for base in cls.__mro__ if base in OURS)
    if cls is not stock:
        module.stock_class = cls
    module.__class__ = OURS[stock]


class ActivateArgument:
    """A forward pre-hook that applies to an argument the activation whose module is now an identity."""

    def __init__(self, activation: nn.Module, position: int, name: str) -> None:
        self.activation, self.position, self.name = activation, position, name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: self.activation(kwargs[self.name])}
        before, after = args[: self.position], args[self.position + 1 :]
        return (*before, self.activation(args[self.position]), *after), kwargs


def _fuse(found: Fusion) -> None:
    placeholder = nn.Identity().train(found.module.training)
    for place in found.places:
        found.parent._modules[place] = placeholder
    for norm in found.norms:
        norm.activation = found.name
    if found.argument is not None:
        hook = ActivateArgument(found.module, *found.argument)
        found.parent.register_forward_pre_hook(hook, with_kwargs=True)
    # For `back`. The parent has it, since copies and other models may come to hold the placeholder.
    record = (placeholder, found.module, found.places, found.norms)
    vars(found.parent).setdefault(fusion.RECORDS, []).append(record)


def _unfuse(model: nn.Module) -> None:
    parents = _parents(model)
    for parent in list(model.modules()):
        kept = []
        for record in vars(parent).pop(fusion.RECORDS, []):
            placeholder, activation, places, norms = record
            at_places = all(parent._modules.get(place) is placeholder for place in places)
            if not at_places or any(
                {*parents.get(module, [])} != {parent} for module in (placeholder, *norms)
            ):
                kept.append(record)
                continue
            activation.training = placeholder.training
            parent._modules.update(dict.fromkeys(places, activation))
            for norm in norms:
                vars(norm).pop("activation", None)
            for key, hook in list(parent._forward_pre_hooks.items()):
                if isinstance(hook, ActivateArgument) and hook.activation is activation:
                    del parent._forward_pre_hooks[key], parent._forward_pre_hooks_with_kwargs[key]
        if kept:
            vars(parent)[fusion.RECORDS] = kept


# --- Report ---------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One norm. `shape`, `dtype` and `rung` are those of its last call that was watched."""

    site: str
    module: str
    note: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    rung: str | None = None

    def cells(self) -> tuple[str, ...]:
        shape = "not seen" if self.shape is None else str(list(self.shape))
        return (self.site or "(model)", self.module, shape, self.dtype or "", self.rung or "", self.note)


class Report:
    """What `steadynorm.report` returns."""

    def __init__(self, model: nn.Module) -> None:
        self._sites = find_sites(model)
        self._hooks: list[Any] = []
        self.rows = [Row(site.name, _class_name(site.module), _note(site)) for site in self._sites]

    def __enter__(self) -> Report:
        for site, row in zip(self._sites, self.rows, strict=True):
            if not isinstance(site.module, torch.jit.ScriptModule):
                hook = site.module.register_forward_hook(_watcher(row), with_kwargs=True)
                self._hooks.append(hook)
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def __repr__(self) -> str:
        if not self.rows:
            return "no GroupNorm and no InstanceNorm"
        table = [("site", "module", "shape", "dtype", "rung", "activation")]
        table += [row.cells() for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)


def _class_name(module: nn.Module) -> str:
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _note(site: Site) -> str:
    if site.refusal is not None:
        return f"left alone: {site.refusal}"
    if type(site.module) not in STOCK:
        return "not converted"
    if site.fusion is not None:
        return f"none: {site.fusion.name} can be fused"
    return _activation(site.module) if site.unfused is None else f"none: {site.unfused}"


def _watcher(row: Row) -> Any:
    def watch(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = [t for t in (*args, *kwargs.values(), output) if isinstance(t, torch.Tensor)]
        if not tensors:
            return
        dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (tensors[0], tensors[-1]))
        row.shape, row.dtype, row.rung = tuple(tensors[0].shape), " -> ".join(dtypes), _rung(module)

    return watch


def _rung(module: nn.Module) -> str | None:
    """What served a norm's last call."""
    if "forward" not in vars(module):
        if type(module) in STOCK:
            return rungs.last_rung()
        if type(module).forward in (cls.forward for cls in OURS):
            return "stock"
    return "unknown"
