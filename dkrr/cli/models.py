"""``models``: what a registry holds, what is in production, and how that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dkrr.cli.errors import Command, CommandGroup
from dkrr.cli.output import print_facts, print_json

if TYPE_CHECKING:
    from dkrr.jobs.registry import Aliases, NamedModel, Version

__all__ = ["models_command", "registry_option"]

registry_option = click.option(
    "--registry", metavar="ROOT", help="Folder or s3:// address of the registry; DKRR_MODELS or ./models by default."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
name_argument = click.argument("name")


@click.group("models", cls=CommandGroup)
def models_command() -> None:
    """Named models: immutable versions, and the aliases production, candidate and previous."""


def _open(registry: str | None, name: str) -> NamedModel:
    from dkrr.jobs.registry import ModelRegistry

    return ModelRegistry(registry).open(name)


@models_command.command("list", cls=Command)
@click.argument("name", required=False)
@registry_option
@json_option
def list_command(name: str | None, registry: str | None, as_json: bool) -> None:
    """List the models, or the versions of NAME."""
    from dkrr.jobs.registry import ModelRegistry

    models = ModelRegistry(registry)
    if name is not None:
        model = models.open(name)
        aliases, versions = model.aliases(), model.versions()
        if as_json:
            print_json([{**version.to_dict(), "aliases": _names(aliases, version.id)} for version in versions])
            return
        if not versions:
            click.echo(f"no versions of {name} in {models.root}", err=True)
        print_facts((version.id, _line(version, aliases)) for version in versions)
        return
    found = [models.open(other) for other in models.names()]
    if as_json:
        print_json([{"name": model.name, "location": model.location, **model.aliases().to_dict()} for model in found])
        return
    if not found:
        click.echo(f"no models in {models.root}", err=True)
    for model in found:
        aliases = model.aliases()
        text = ", ".join(f"{alias} {version}" for alias, version in sorted(aliases.targets.items(), reverse=True))
        print_facts([(model.name, text or "no alias")])


@models_command.command("show", cls=Command)
@name_argument
@click.argument("version", default="production")
@registry_option
@json_option
def show_command(name: str, version: str, registry: str | None, as_json: bool) -> None:
    """Say what VERSION of NAME is: an alias (production by default), an id, or a number; and how NAME has changed."""
    model = _open(registry, name)
    found, aliases = model.resolve(version), model.aliases()
    if as_json:
        print_json(
            {
                **found.to_dict(),
                "model": found.model_path,
                "aliases": _names(aliases, found.id),
                "epoch": aliases.epoch,
                "history": list(aliases.history),
            }
        )
        return
    facts: list[tuple[str, Any]] = [
        ("model", found.model_path),
        ("aliases", ", ".join(_names(aliases, found.id)) or "none"),
        ("published", found.created_at),
        ("rows", f"{found.num_rows:,}"),
        ("digest", found.model_digest),
    ]
    facts += [(key, _short(value)) for key, value in found.facts.items()]
    print_facts(facts, title=f"{name} {found.id}")
    for entry in aliases.history[-5:]:
        changed = ", ".join(f"{alias}: {before or '-'} -> {after or '-'}" for alias, (before, after) in _changes(entry))
        click.echo(f"  epoch {entry['epoch']}  {_utc(entry['at'])}  {entry['why']}  {changed}")


@models_command.command("add", cls=Command)
@name_argument
@click.argument("model")
@click.option("--promote", "at_once", is_flag=True, help="Put it into production at once.")
@registry_option
def add_command(name: str, model: str, at_once: bool, registry: str | None) -> None:
    """Publish MODEL (a model.zarr, or the directory of a run) as a version of NAME, named "candidate".

    The model of a run whose last fit is not finished is that of an earlier one: it is not promoted.
    """
    from dkrr.cli.run import model_location

    named = _open(registry, name)
    version = named.add(model_location(model, finished=at_once))
    if at_once:
        named.promote(version.id)
    click.echo(version.id)


@models_command.command("promote", cls=Command)
@name_argument
@click.argument("version", default="candidate")
@registry_option
def promote_command(name: str, version: str, registry: str | None) -> None:
    """Put VERSION (the candidate by default) of NAME into production, after reading all of it."""
    model = _open(registry, name)
    _print_aliases(name, model.promote(version))


@models_command.command("rollback", cls=Command)
@name_argument
@registry_option
def rollback_command(name: str, registry: str | None) -> None:
    """Put the previous version of NAME into production again; a second time undoes the first."""
    _print_aliases(name, _open(registry, name).rollback())


@models_command.command("prune", cls=Command)
@name_argument
@click.option("--keep", default=3, show_default=True, help="Newest versions that stay besides those with an alias.")
@click.option(
    "--grace",
    default=86_400.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a version stays after it was published or lost its last alias; readers may hold it.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@registry_option
def prune_command(name: str, keep: int, grace: float, dry_run: bool, registry: str | None) -> None:
    """Delete versions of NAME that nobody needs."""
    from dkrr.jobs.registry.prune import prunable_versions, prune_versions

    work = prunable_versions if dry_run else prune_versions
    gone = work(_open(registry, name).location, keep=keep, grace_seconds=grace)
    for version in gone:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {version.id}")
    if not gone:
        click.echo("nothing to delete")


def _names(aliases: Aliases, version: str) -> list[str]:
    return sorted(name for name, target in aliases.targets.items() if target == version)


def _line(version: Version, aliases: Aliases) -> str:
    parts = [version.created_at, f"{version.num_rows:,} rows", *_names(aliases, version.id)]
    score = version.facts.get("score")
    if isinstance(score, dict):
        parts.insert(2, ", ".join(f"{name} {value:.6g}" for name, value in score.items()))
    return "  ".join(parts)


def _print_aliases(name: str, aliases: Aliases) -> None:
    print_facts(sorted(aliases.targets.items(), reverse=True), title=name)


def _changes(entry: dict[str, Any]) -> list[tuple[str, list[str | None]]]:
    return sorted(entry["changed"].items())


def _utc(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _short(value: Any) -> Any:
    import json

    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
