"""Where the encoders of a model are.

Models agree on names more than on places: a vision tower is called ``visual`` or ``vision_tower``, but sits at the top,
under ``model``, under ``thinker`` or deeper. So the tree is searched level by level, and the shallowest module with a
name that the table knows is the encoder. transformers' own ``get_encoder`` gives the model itself where it finds none,
and needs the class; this works on any ``torch.nn.Module``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mmcopy.config import MODALITIES
from mmcopy.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODALITIES", "PATCH_NAMES", "Tower", "find_towers", "spine", "takes_video", "unwrap"]

VISION_NAMES = ("visual", "vision_tower", "vision_model", "vision_encoder", "image_tower", "img_processor")
VIDEO_NAMES = ("video_tower", *VISION_NAMES)
AUDIO_NAMES = ("audio_tower", "audio_encoder", "speech_encoder", "audio_embed")
"""Names of encoder modules, the likeliest first: of two on one level the earlier in this order is the encoder."""

PATCH_NAMES = frozenset({"patch_embed", "patch_embedding", "patch_embedder", "patch_conv", "patch_embeddings"})
"""What the module is called that turns pixels into tokens."""

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Where torch.compile, FSDP and checkpoint wrappers keep the module that they wrap."""

_DEPTH = 8
"""How deep an encoder is looked for. Phi-4's under PEFT: base_model.model.model.embed_tokens_extend.image_embed."""

_VIDEO_FIELDS = ("video_token_id", "video_token_index")


@dataclass(frozen=True, slots=True, eq=False)
class Tower:
    """One encoder: its module, unwrapped, and its path in the model ("" when the model is the encoder)."""

    module: nn.Module
    path: str


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s, DDP's, FSDP's and like wrappers: one that only holds another one."""
    while True:
        children = dict(module.named_children())
        name = next((name for name in _WRAPPED if name in children), None)
        if name is None and set(children) == {"module"}:
            name = "module"
        if name is None:
            return module
        module = children[name]


def find_towers(model: nn.Module) -> Mapping[str, Tower | str]:
    """For each of ``MODALITIES`` its encoder, or why there is none.

    Raises :class:`ConfigError` when ``model`` is not a module.
    """
    if not hasattr(model, "named_children"):
        raise ConfigError(f"the model is a {type(model).__name__}, want a torch.nn.Module")
    vision = _named(model, VISION_NAMES) or _declaring(model, "image") or _bare(model)
    audio = _named(model, AUDIO_NAMES) or _declaring(model, "audio")
    if vision is None:
        no_vision = f"no module called {', '.join(VISION_NAMES)} in {_kind(model)}, and it is not one itself"
        image: Tower | str = no_vision
        video = _named(model, VIDEO_NAMES) or no_vision
    else:
        image = vision
        video = (_named(model, VIDEO_NAMES) or vision) if takes_video(model) else f"{_kind(model)} takes no video"
    return {
        "image": image,
        "video": video,
        "audio": audio or f"no module called {', '.join(AUDIO_NAMES)} in {_kind(model)}, and it is not one itself",
    }


def takes_video(model: nn.Module) -> bool:
    """Whether the model encodes video: it has a tower or a method of its own for it, or a token that stands for one."""
    for module in spine(model):
        if hasattr(module, "get_video_features") or isinstance(getattr(module, "video_tower", None), _module_type()):
            return True
        config = getattr(module, "config", None)
        if any(getattr(config, field, None) is not None for field in _VIDEO_FIELDS):
            return True
    return "video" in _declared(unwrap(model))


def spine(model: nn.Module) -> Iterator[nn.Module]:
    """The model and the models it is made around, outermost first."""
    module: nn.Module | None = unwrap(model)
    for _ in range(_DEPTH):
        if module is None:
            return
        yield module
        children = dict(module.named_children())
        inner = next((name for name in ("base_model", "model", "thinker") if name in children), None)
        module = None if inner is None else unwrap(children[inner])


def _named(model: nn.Module, names: tuple[str, ...]) -> Tower | None:
    level = [Tower(unwrap(model), "")]
    for _ in range(_DEPTH):
        found = [
            (names.index(name), child)
            for parent in level
            for name, child in _children(parent)
            if name in names and _has_tensors(child.module)
        ]
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        level = [child for parent in level for _, child in _children(parent)]
    return None


def _children(parent: Tower) -> Iterator[tuple[str, Tower]]:
    for name, child in parent.module.named_children():
        yield name, Tower(unwrap(child), f"{parent.path}.{name}".lstrip("."))


def _declaring(model: nn.Module, modality: str) -> Tower | None:
    """The shallowest module that says it takes this modality and no text, the model itself first."""
    level = [Tower(unwrap(model), "")]
    for _ in range(_DEPTH):
        for tower in level:
            declared = _declared(tower.module)
            if modality in declared and "text" not in declared:
                return tower
        level = [child for parent in level for _, child in _children(parent)]
    return None


def _bare(model: nn.Module) -> Tower | None:
    """The model as a vision tower: an encode worker may hold nothing else, of no class that we know."""
    module = unwrap(model)
    names = {name for name, _ in module.named_children()}
    below = {name for child in module.children() for name, _ in child.named_children()}
    return Tower(module, "") if PATCH_NAMES & names or (PATCH_NAMES & below and "embeddings" in names) else None


def _declared(module: nn.Module) -> tuple[str, ...]:
    """What a transformers class says it takes: ``input_modalities``, for example ("image", "video")."""
    declared = getattr(module, "input_modalities", ())
    return (declared,) if isinstance(declared, str) else tuple(cast(Any, declared) or ())


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _module_type() -> type[Any]:
    from torch import nn

    return nn.Module


def _kind(model: nn.Module) -> str:
    return type(unwrap(model)).__name__
