"""Published drafters that are not served, or not as a model, known by config.json alone, each with the reason.

Their files look like those of models or heads that are served, so every place that reads a config.json asks here
first. The names are those that their publishers, speculators and the engines that serve them write.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]

BLOCK = "guesses a block of masks in one pass over keys and values made of the target's features"
DSPARK = f"a DSpark drafter, which {BLOCK}, and corrects it with a Markov head"
P_EAGLE = "a P-EAGLE head, whose later guesses stand on masks and a learnt state instead of the guesses before them"
NOT_SERVED, NOT_A_MODEL = "such drafters are not served", "name it with --head, beside its target"


class DrafterLayout(NamedTuple):
    """A drafter that is known and no model."""

    detects: Callable[[Config], bool]
    what: str
    is_served: bool = False
    """Whether it is served as a head."""


def refused_drafter(config: Config, *, is_head: bool = False) -> str | None:
    """What a config.json says that its folder holds, where that is a drafter which is not served so; else None."""
    found = next((layout for layout in LAYOUTS if layout.detects(config)), None)
    if found is None or (found.is_served and is_head):
        return None
    return f"{found.what}: {NOT_A_MODEL if found.is_served else NOT_SERVED}"


def _architectures(config: Config) -> str:
    """The architectures and the type that a config.json names, in small letters."""
    named = config.get("architectures")
    names = [
        *(named if isinstance(named, list) else ()),
        config.get("model_type"),
        config.get("speculators_model_type"),
    ]
    return " ".join(str(name).lower() for name in names if name is not None)


def _inside(config: Config) -> Config:
    """The keys of a block drafter, wherever its publisher puts them."""
    inner = config.get("dflash_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _is_pard_2(config: Config) -> bool:
    is_named = config.get("spd_type") == "pard2" or bool(config.get("pard2"))
    return is_named or any(key.startswith("pard2_") for key in config)


def _is_peagle(config: Config) -> bool:
    names = _architectures(config)
    has_masks = config.get("ptd_token_id") is not None or bool(config.get("parallel_drafting"))
    return "peagle" in names or ("eagle" in names and (has_masks or config.get("pard_token") is not None))


def _is_dflash_2(config: Config) -> bool:
    keys = ("selector_rank", "selector_top_k", "conv_kernel_size")
    return "dflash2" in _architectures(config) or (
        is_dflash(config) and any(_inside(config).get(key) is not None for key in keys)
    )


def is_dflash(config: Config) -> bool:
    """Whether it is a DFlash drafter, of whatever version."""
    return "dflash" in _architectures(config) or config.get("dflash_config") is not None


LAYOUTS: tuple[DrafterLayout, ...] = (
    DrafterLayout(
        _is_pard_2,
        "a PARD-2 draft, whose embeddings have features of the target added to them (target_proj)",
    ),
    DrafterLayout(_is_peagle, P_EAGLE),
    DrafterLayout(
        lambda config: all(part in _architectures(config) for part in ("gemma", "assistant")),
        "the assistant layers of Gemma 4, whose attention has queries only and reads the target's own keys and values",
    ),
    DrafterLayout(
        lambda config: "dspark" in _architectures(config) or _inside(config).get("markov_rank") is not None, DSPARK
    ),
    DrafterLayout(
        _is_dflash_2,
        f"a DFlash 2 drafter, which {BLOCK}, with convolutions inside the block and a selector of candidates",
    ),
    DrafterLayout(is_dflash, f"a DFlash drafter, which {BLOCK}", is_served=True),
    DrafterLayout(
        lambda config: "xpress" in _architectures(config),
        f"an XPress drafter, which {BLOCK}, and refines it several times",
    ),
)
"""The first that detects a configuration names it."""
