"""Named models with immutable versions and aliases that move: what is in production, and how that changes."""

from dkrr.jobs.registry.aliases import ALIASES, Aliases, read_aliases
from dkrr.jobs.registry.names import MODELS_VARIABLE, Reference, models_folder, parse_reference
from dkrr.jobs.registry.prune import GRACE_SECONDS, prune_versions, versions_kept
from dkrr.jobs.registry.registry import ModelRegistry, NamedModel
from dkrr.jobs.registry.versions import Version

__all__ = [
    "ALIASES",
    "GRACE_SECONDS",
    "MODELS_VARIABLE",
    "Aliases",
    "ModelRegistry",
    "NamedModel",
    "Reference",
    "Version",
    "models_folder",
    "parse_reference",
    "prune_versions",
    "read_aliases",
    "versions_kept",
]
