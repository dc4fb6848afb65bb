"""``models``: what a registry holds, what is in production, and how that changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from dkrr.cli.errors import Command, CommandGroup
from dkrr.cli.output import print_facts, print_json

if TYPE_CHECKING:
    from dkrr.jobs.registry import Aliases, NamedModel, Version

__all__ = ["model_location", "models_command", "registry_option"]

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


def model_location(text: str, registry: str | None = None, *, finished: bool = False) -> str:
    """The model that a text means: a path itself, that of a run (its directory or name), or NAME@ALIAS of a registry.

    Where a run is meant that is not finished, the model may be that of an earlier fit, and a line on stderr says so.

    Parameters
    ----------
    finished
        Whether such a run is refused.

    Raises
    ------
    StoreError
        Nothing is there, or something else.
    """
    from dkrr.errors import StoreError
    from dkrr.jobs.registry import ModelRegistry, parse_reference
    from dkrr.jobs.runs.facts import Run, find_run
    from dkrr.jobs.runs.status import look_once
    from dkrr.store.files import is_url, join, name_of, read_json

    reference = parse_reference(text)
    if reference is not None:
        return ModelRegistry(registry).open(reference.name).resolve(reference.selector).model_path
    inside = join(text, "model.zarr")
    if is_url(text):
        if name_of(text).endswith(".zarr") or read_json(inside, "zarr.json") is None:
            return text
        run = Run(text)
    elif os.path.isdir(inside):
        run = Run(text)
    elif os.path.isfile(join(text, "zarr.json")) or (text.endswith(".zarr") and os.path.isdir(text)):
        return text  # what may be wrong with it is said where it is read
    else:
        try:
            run = find_run(text)
        except StoreError:
            seen = "is not a model" if os.path.lexists(text) else "does not exist"
            raise StoreError(f"{text} {seen}", hint="give a model.zarr, a run, or NAME@ALIAS of a registry") from None
    if not run.exists():
        return inside  # of a version, say
    state, shown = look_once(run, beat_seconds=0.0).state, run.shown
    hint = f"`dkrr resume {text}` goes on with it, `dkrr logs {text}` says what happened"
    if not run.has("model.zarr/zarr.json"):
        raise StoreError(f"run {text} has no model: it is {state}", hint=hint)
    model, result = run.path("model.zarr"), run.read("result.json")
    if state != "finished":
        which = "has not been evaluated" if result is None else "is the model of an earlier fit"
        if result is not None and "plan" in result:
            which += f", of {result['plan']['num_rows']:,} rows"
        if finished:
            raise StoreError(f"run {shown} is {state}, and what it holds {which}", hint=f"{hint}; or name {model}")
        click.echo(f"run {shown} is {state}: what it holds {which}", err=True)
    return model


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
