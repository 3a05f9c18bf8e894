# SPDX-License-Identifier: Apache-2.0
"""Which activation provably follows a normalisation, with nothing else reading in between.

Three proofs: the next place of an `nn.Sequential`; a block of diffusers or MONAI whose forward is known; a
torch.fx graph of a forward that has no other path than the one traced.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, MethodType, ModuleType
from typing import Any

from torch import fx, nn


@dataclass(frozen=True)
class Fusion:
    """An activation module, its places in one parent, and the norms that it follows there."""

    name: str  # as the `activation` argument has it
    module: nn.Module
    parent: nn.Module
    places: tuple[str, ...]
    norms: tuple[nn.Module, ...]
    argument: tuple[int, str] | None = None  # of the parent's forward, which the activation is applied to too


@dataclass(frozen=True)
class KnownBlock:
    """A block in which every use of `activation` follows a norm, but for the one on `embedding`."""

    norms: tuple[str, ...]
    activation: str
    embedding: tuple[int, str] | None = None


_RESNET = KnownBlock(("norm1", "norm2"), "nonlinearity", (1, "temb"))
_HEAD = KnownBlock(("conv_norm_out",), "conv_act")
# By module and class, as of diffusers 0.42.1 and MONAI 1.6.1 (tests/python/test_convert_models.py).
KNOWN_BLOCKS = {
    "diffusers.models.resnet.ResnetBlock2D": _RESNET,
    "diffusers.models.resnet.TemporalResnetBlock": _RESNET,
    "diffusers.models.unets.unet_2d.UNet2DModel": _HEAD,
    "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel": _HEAD,
    "diffusers.models.unets.unet_3d_condition.UNet3DConditionModel": _HEAD,
    "diffusers.models.autoencoders.vae.Encoder": _HEAD,
    "diffusers.models.autoencoders.vae.Decoder": _HEAD,
    "monai.networks.nets.diffusion_model_unet.DiffusionUNetResnetBlock": KnownBlock(
        ("norm1", "norm2"), "nonlinearity", (1, "emb")
    ),
}

# The attribute of a parent that has what was fused in it, for the way back; convert.py writes and reads it.
RECORDS = "fused_activations"

# A fusion for each norm's id, or one sentence why there is none.
Answers = dict[int, Fusion | str]


def find(parent: nn.Module, norms: Iterable[nn.Module]) -> Answers:
    """What can be fused into `norms`, children of `parent` that are used nowhere else."""
    norms = list(norms)
    cls = type(parent)
    known = KNOWN_BLOCKS.get(f"{cls.__module__}.{cls.__qualname__}")
    if "forward" in vars(parent):
        return _all(norms, f"the forward of this {cls.__name__} is overridden")
    if cls.forward is nn.Sequential.forward:
        name = defined_beyond(cls, nn.Sequential)
        return _all(norms, f"{cls.__name__} defines {name}") if name else _in_sequential(parent, norms)
    if known is not None:
        return _in_known_block(parent, norms, known)
    return _in_traced(parent, norms)


def activation_name(module: nn.Module) -> tuple[str | None, str]:
    """The name of an activation that can be fused, or None and the reason."""
    name = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}.get(type(module))
    if name == "gelu" and module.approximate == "tanh":
        name = "gelu_tanh"
    if name is None:
        return None, f"{type(module).__name__} follows"
    if "forward" in vars(module):
        return None, f"the {type(module).__name__} that follows has a forward of its own"
    if has_hooks(module):
        return None, f"the {type(module).__name__} that follows has hooks"
    if module._parameters or module._buffers or module._modules:
        return None, f"the {type(module).__name__} that follows has parameters, buffers or modules"
    return name, ""


def has_hooks(module: nn.Module) -> bool:
    return any(name.endswith("_hooks") and _foreign(hooks) for name, hooks in vars(module).items())


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(_foreign(module._forward_hooks) or _foreign(module._forward_pre_hooks))


def has_global_hooks() -> bool:
    """Whether a hook of every module is registered, forward or backward."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in kinds)


def _foreign(hooks: dict) -> list[Any]:
    """A module's hooks without conversion's own and the report's, which change no norm's output."""
    return [hook for hook in hooks.values() if getattr(hook, "__module__", None) != f"{__package__}.convert"]


_UNREMARKABLE = {
    "__init__",
    "__doc__",
    "__module__",
    "__qualname__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__conditional_annotations__",
    "__firstlineno__",
    "__static_attributes__",
}


def defined_beyond(cls: type, base: type) -> str | None:
    """A name that a subclass of `base`, or a class that it also inherits from, defines besides `__init__`."""
    added = [other for other in cls.__mro__ if other not in base.__mro__]
    return next((name for other in added for name in vars(other) if name not in _UNREMARKABLE), None)


def _all(norms: list[nn.Module], reason: str) -> Answers:
    return {id(norm): reason for norm in norms}


def held_elsewhere(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that an attribute in a model other than `_modules` holds, itself or in a container."""
    holders: dict[nn.Module, str] = {}
    for module in model.modules():
        for name, attribute in vars(module).items():
            if name in ("_modules", RECORDS):
                continue
            values, seen = [attribute], set()
            for value in values:  # grows
                if isinstance(value, nn.Module):
                    holders.setdefault(value, f"{type(module).__name__}.{name}")
                elif isinstance(value, (list, tuple, set, dict, MethodType)) and id(value) not in seen:
                    seen.add(id(value))
                    held = (value.__self__,) if isinstance(value, MethodType) else value
                    values += [*value, *value.values()] if isinstance(value, dict) else held
    return holders


# --- nn.Sequential ----------------------------------------------------------------------------------------


def _in_sequential(parent: nn.Module, norms: list[nn.Module]) -> Answers:
    answers = _all(norms, "nothing follows in its Sequential")
    children = [item for item in parent._modules.items() if not _passes_through(item[1])]
    for (_, norm), (place, module) in pairwise(children):
        if id(norm) in answers:
            name, reason = activation_name(module)
            answers[id(norm)] = Fusion(name, module, parent, (place,), (norm,)) if name else reason
    return answers


def _passes_through(module: nn.Module) -> bool:
    """Whether a module's output is its input, as of the Dropout(0) that MONAI puts before activations."""
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    nothing = type(module) is nn.Identity or (type(module) in dropouts and module.p == 0)
    return nothing and "forward" not in vars(module) and not has_hooks(module)


# --- Known blocks -----------------------------------------------------------------------------------------


def _in_known_block(parent: nn.Module, norms: list[nn.Module], known: KnownBlock) -> Answers:
    places = {place: getattr(parent, place) for place in known.norms}
    ours = tuple(norm for norm in norms if any(norm is other for other in places.values()))
    answers = _all(norms, f"no activation is known to follow in {type(parent).__name__}")
    if getattr(parent, "time_embedding_norm", "default") == "scale_shift":
        return answers | _all(ours, "a scale and shift stand between norm2 and the activation they share")
    left_out = [place for place, norm in places.items() if not any(norm is other for other in ours)]
    if left_out:
        return answers | _all(ours, f"{left_out[0]} shares the activation and can't have it fused")
    activation = getattr(parent, known.activation)
    name, reason = activation_name(activation)
    if name is None:
        return answers | _all(ours, reason)
    applied = getattr(parent, "time_emb_proj", None) is not None and not getattr(
        parent, "skip_time_act", False
    )
    fusion = Fusion(name, activation, parent, (known.activation,), ours, known.embedding if applied else None)
    return answers | {id(norm): fusion for norm in ours}


# --- torch.fx ---------------------------------------------------------------------------------------------

_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_CHANGES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR"}
_HIDING = {"setattr", "delattr", "exec", "eval", "type"}


class _Watched:
    """An activation as a traced forward has it: its calls are traced, its other uses noted."""

    def __init__(self, module: nn.Module, reads: dict[nn.Module, str]) -> None:
        object.__setattr__(self, "_watched", (module, reads))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _ = object.__getattribute__(self, "_watched")
        return module(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        module, reads = object.__getattribute__(self, "_watched")
        reads.setdefault(module, name)
        return getattr(module, name)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # else a forward that updates a buffer would do so while it is traced

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[nn.Module, str] = {}  # what forward reads of an activation

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        value = super().getattr(attr, attr_val, parameter_proxy_cache)
        watched = isinstance(value, nn.Module) and activation_name(value)[0] is not None
        return _Watched(value, self.reads) if watched else value

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _in_traced(parent: nn.Module, norms: list[nn.Module]) -> Answers:
    reason = _why_not_one_path(parent)
    if reason is not None:
        return _all(norms, reason)
    try:
        tracer = _Tracer()
        graph = tracer.trace(parent)
    except Exception as error:  # a forward may fail on a proxy in any way it likes
        return _all(norms, f"torch.fx can't trace {type(parent).__name__}.forward: {type(error).__name__}")
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(id(parent.get_submodule(node.target)), []).append(node)

    answers: Answers = {}
    followers: dict[int, tuple[nn.Module, list[nn.Module]]] = {}
    for norm in norms:
        after = _what_follows(parent, calls.get(id(norm), []))
        if isinstance(after, str):
            answers[id(norm)] = after
        elif after in tracer.reads:
            read = f"reads {tracer.reads[after]} of the {type(after).__name__} that follows"
            answers[id(norm)] = f"{type(parent).__name__}.forward {read}"
        else:
            followers.setdefault(id(after), (after, []))[1].append(norm)
    for activation, followed in followers.values():
        answers |= _fuse_traced(parent, activation, followed, calls)
    return answers


def _what_follows(parent: nn.Module, nodes: list[fx.Node]) -> nn.Module | str:
    """The module that takes the output of every one of a norm's calls, and takes it alone."""
    cls = type(parent).__name__
    if not nodes:
        return f"{cls}.forward does not call it"
    found = []
    for node in nodes:
        users = list(node.users)
        if len(users) != 1:
            return f"{len(users) or 'no'} operations of {cls}.forward read it"
        user = users[0]
        if user.op == "output":
            return f"{cls}.forward returns it"
        if user.op != "call_module":
            called = getattr(user.target, "__name__", user.target)
            return f"{called} follows, which is no module"
        found.append(parent.get_submodule(user.target))
    if any(module is not found[0] for module in found):
        return "different modules follow its calls"
    return found[0]


def _fuse_traced(
    parent: nn.Module, activation: nn.Module, norms: list[nn.Module], calls: dict[int, list[fx.Node]]
) -> Answers:
    cls = type(parent)
    name, reason = activation_name(activation)
    if name is None:
        return _all(norms, reason)
    places = tuple(place for place, child in parent._modules.items() if child is activation)
    if not places:
        return _all(norms, f"the {type(activation).__name__} that follows is not a child of {cls.__name__}")
    fused = {node for norm in norms for node in calls[id(norm)]}
    if any(node not in fused for call in calls[id(activation)] for node in call.all_input_nodes):
        return _all(norms, f"{cls.__name__}.forward applies {places[0]} to something else too")
    named = {*places, *(place for place, child in parent._modules.items() if any(child is n for n in norms))}
    for method, function in _own_functions(cls):
        if method not in ("__init__", "forward") and named & _names(function.__code__):
            return _all(norms, f"{cls.__name__}.{method} may use it too")
    fusion = Fusion(name, activation, parent, places, tuple(norms))
    return {id(norm): fusion for norm in norms}


def _why_not_one_path(parent: nn.Module) -> str | None:
    """A trace is a proof when forward can't take another path, nor change or call what is not traced."""
    cls, forward = type(parent), type(parent).forward
    where = f"{cls.__name__}.forward"
    if not inspect.isfunction(forward):
        return f"{where} is no Python function"
    code = forward.__code__
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return f"{where} defines a function, so that its trace is no proof"
    for instruction in dis.get_instructions(code):
        if instruction.opcode in _JUMPS:
            return f"{where} branches, so that its trace is no proof"
        if instruction.opname in _CHANGES:
            return f"{where} changes an object, so that it is not traced"
        if instruction.opname == "IMPORT_NAME":
            return f"{where} imports, so that its trace is no proof"
    values = dict(
        zip(code.co_freevars, (cell.cell_contents for cell in forward.__closure__ or ()), strict=True)
    )
    for name in sorted(_names(code) - {"__class__"}):  # super() needs that one
        found = (
            values.get(name),
            vars(parent).get(name),
            inspect.getattr_static(cls, name, None),
            forward.__globals__.get(name),
        )
        if name in _HIDING or not all(map(_is_transparent, found)):
            return f"{where} uses {name}, which torch.fx does not see into"
    return None


def _is_transparent(value: Any) -> bool:
    """Whether torch.fx sees all that forward may do with a value, since it is a constant or torch's own."""
    if value is None or isinstance(value, (bool, int, float, str, tuple)) or inspect.isbuiltin(value):
        return True
    owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return (owner or "").split(".")[0] in ("torch", "math", "operator")


def _own_functions(cls: type) -> Iterable[tuple[str, Any]]:
    """The functions of a class and of its bases, properties' getters among them."""
    for base in cls.__mro__:
        for name, value in vars(base).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(function):
                yield name, function


def _names(code: CodeType) -> set[str]:
    """Every name that a function looks up, or spells in a string, those of functions inside it too."""
    names = {
        *code.co_names,
        *code.co_freevars,
        *(constant for constant in code.co_consts if isinstance(constant, str)),
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
