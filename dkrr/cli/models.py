"""What is stored: ``models``, what a registry holds and how that changes; ``info`` on a path; and ``gc`` of a store."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from dkrr.cli.app import CommandGroup, json_option, main, print_facts, show
from dkrr.errors import StoreError
from dkrr.jobs.run_directory import RunDirectory, find_run, look_once
from dkrr.markup import kernel_words, size
from dkrr.store.documents import manifest_digest
from dkrr.store.files import children, is_url, join, name_of

if TYPE_CHECKING:
    from dkrr.jobs.inspection import Garbage
    from dkrr.jobs.registry import Aliases, NamedModel, Version


registry_option = click.option(
    "--registry", metavar="ROOT", help="Folder or s3:// address of the registry; DKRR_MODELS or ./models by default."
)
name_argument = click.argument("name")


@main.group("models", cls=CommandGroup)
def models_command() -> None:
    """Named models: immutable versions, and the aliases production, candidate and previous."""


def _open(registry: str | None, name: str) -> NamedModel:
    from dkrr.jobs.registry import ModelRegistry

    return ModelRegistry(registry).open(name)


@models_command.command("list")
@click.argument("name", required=False)
@registry_option
@json_option
def list_command(name: str | None, registry: str | None, as_json: bool) -> None:
    """List the models, or the versions of NAME."""
    from dkrr.jobs.registry import ModelRegistry

    models = ModelRegistry(registry)
    if name is not None:
        aliases, versions = models.open(name).aliases(), models.open(name).versions()
        documents = [{**version.to_dict(), "aliases": _names(aliases, version.id)} for version in versions]
        facts = [(version.id, _line(version, aliases)) for version in versions]
    else:
        found = [(model, model.aliases()) for model in map(models.open, models.names())]
        documents = [{"name": model.name, "location": model.location, **known.to_dict()} for model, known in found]
        facts = [(model.name, ", ".join(" ".join(item) for item in _targets(known))) for model, known in found]
    if not facts and not as_json:
        click.echo(f"no {'models' if name is None else f'versions of {name}'} in {models.root}", err=True)
    show(as_json, documents, [(key, text or "no alias") for key, text in facts])


@models_command.command("show")
@name_argument
@click.argument("version", default="production")
@registry_option
@json_option
def show_command(name: str, version: str, registry: str | None, as_json: bool) -> None:
    """Say what VERSION of NAME is: an alias (production by default), an id, or a number; and how NAME has changed."""
    model = _open(registry, name)
    found, aliases = model.resolve(version), model.aliases()
    names, history = _names(aliases, found.id), list(aliases.history)
    more = {"model": found.model_path, "aliases": names, "epoch": aliases.epoch, "history": history}
    facts = [
        ("model", found.model_path),
        ("aliases", ", ".join(names) or "none"),
        ("published", found.created_at),
        ("rows", f"{found.num_rows:,}"),
        ("digest", found.model_digest),
        *((key, json.dumps(v, sort_keys=True) if isinstance(v, dict | list) else v) for key, v in found.facts.items()),
    ]
    show(as_json, {**found.to_dict(), **more}, facts, title=f"{name} {found.id}")
    for entry in history[-5:] if not as_json else []:
        changes = sorted(entry["changed"].items())
        changed = ", ".join(f"{alias}: {before or '-'} -> {after or '-'}" for alias, (before, after) in changes)
        when = datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        click.echo(f"  epoch {entry['epoch']}  {when}  {entry['why']}  {changed}")


@models_command.command("add")
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


@models_command.command("promote")
@name_argument
@click.argument("version", default="candidate")
@registry_option
def promote_command(name: str, version: str, registry: str | None) -> None:
    """Put VERSION (the candidate by default) of NAME into production, after reading all of it."""
    print_facts(_targets(_open(registry, name).promote(version)), title=name)


@models_command.command("rollback")
@name_argument
@registry_option
def rollback_command(name: str, registry: str | None) -> None:
    """Put the previous version of NAME into production again; a second time undoes the first."""
    print_facts(_targets(_open(registry, name).rollback()), title=name)


@models_command.command("prune")
@name_argument
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Newest versions that stay besides those with an alias.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=86_400.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a version stays after it was published or lost its last alias; readers may hold it.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@registry_option
def prune_command(name: str, keep: int, grace: float, dry_run: bool, registry: str | None) -> None:
    """Delete versions of NAME that nobody needs."""
    model = _open(registry, name)
    gone = (model.unneeded if dry_run else model.prune)(keep=keep, grace_seconds=grace)
    lines = [f"{'would delete' if dry_run else 'deleted'} {version.id}" for version in gone]
    click.echo("\n".join(lines or ["nothing to delete"]))


def model_location(text: str, registry: str | None = None, *, finished: bool = False) -> str:
    """The model that a text means: a path itself, that of a run (its directory or name), or NAME@ALIAS of a registry.

    Where a run is meant that is not finished, the model may be that of an earlier attempt: a line on stderr says so.

    Parameters
    ----------
    finished
        Whether such a run is refused.

    Raises
    ------
    StoreError
        Nothing is there, or something else.
    """
    from dkrr.jobs.registry import parse_reference

    reference = parse_reference(text)
    if reference is not None:
        return _open(registry, reference.name).resolve(reference.selector).model_path
    run, inside = RunDirectory(text), join(text, "model.zarr")
    if not run.has("model.zarr/zarr.json"):
        is_array = name_of(text).endswith(".zarr") or run.has("zarr.json")
        if is_url(text) or (is_array and os.path.isdir(text)):
            return text  # what may be wrong with it is said where it is read
        try:
            run = find_run(text)
        except StoreError:
            seen = "is not a model" if os.path.lexists(text) else "does not exist"
            raise StoreError(f"{text} {seen}", hint="give a model.zarr, a run, or NAME@ALIAS of a registry") from None
    if not run.exists():
        return inside  # of a version, say
    state, model = look_once(run, beat_seconds=0.0).state, run.path("model.zarr")
    hint = f"`dkrr resume {text}` goes on with it, `dkrr logs {text}` says what happened"
    if not run.has("model.zarr/zarr.json"):
        raise StoreError(f"run {text} has no model: it is {state}", hint=hint)
    if state != "finished":
        result = run.read("result.json")
        which = "has not been evaluated" if result is None else "is the model of an earlier attempt"
        which += f", of {result['plan']['num_rows']:,} rows" if result and "plan" in result else ""
        if finished:
            raise StoreError(f"run {run.shown} is {state}, and what it holds {which}", hint=f"{hint}; or name {model}")
        click.echo(f"run {run.shown} is {state}: what it holds {which}", err=True)
    elif (fitted := (run.read("result.json") or {}).get("model_digest")) and manifest_digest(model) != fitted:
        raise StoreError(
            f"{model} is another model than the one that run {run.shown} fitted",
            hint=f"restore it, or fit again; to use it as it is, name {model}",
        )
    return model


def _targets(aliases: Aliases) -> list[tuple[str, str]]:
    return sorted(aliases.targets.items(), reverse=True)


def _names(aliases: Aliases, version: str) -> list[str]:
    return sorted(name for name, target in aliases.targets.items() if target == version)


def _line(version: Version, aliases: Aliases) -> str:
    score = version.facts.get("score")
    known = [f"{k} {v:.6g}" for k, v in score.items() if v is not None] if isinstance(score, dict) else []
    shown = [version.created_at, f"{version.num_rows:,} rows", ", ".join(known), *_names(aliases, version.id)]
    return "  ".join(filter(None, shown))


# --- paths and stores -------------------------------------------------------------------------------------------------


@main.command("info")
@click.argument("path")
@click.option("--verify", "whole", is_flag=True, help="Read everything and compare it with its checksums.")
@json_option
def info_command(path: str, whole: bool, as_json: bool) -> None:
    """Say what PATH is (data set, model, Gram matrix, factor, run); with --verify, whether it is whole."""
    from dkrr.jobs.inspection import describe, verify
    from dkrr.jobs.run_directory import run_kind

    (kind, found), problems = describe(path), verify(path) if whole else []
    document = {"kind": kind, "path": path, **found} | ({"problems": problems} if whole else {})
    facts = [(name, kernel_words(value) if name == "kernel" else value) for name, value in found.items()]
    facts += [("", f"problem: {problem}") for problem in problems]
    facts += [("", "verified: everything is there and unchanged")] * (whole and not problems)
    show(as_json, document, facts, title=f"{kind} {path}")
    if problems:
        is_made_again = kind in ("Gram matrix", "factor", "run") and run_kind(path) != "retrain"
        raise StoreError(
            f"{path} has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            hint=("delete what is damaged and start the job again, or " if is_made_again else "") + "restore it",
        )


@main.command("gc")
@click.argument("path", default="runs")
@click.option("--runs", multiple=True, help="Another folder with runs or models that use the store; repeatable.")
@click.option("--older-than", default=3600.0, metavar="SECONDS", help="Leave what changed later alone (default 3600).")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def gc_command(path: str, runs: tuple[str, ...], older_than: float, yes: bool) -> None:
    """List, then delete, what no run and no model needs.

    PATH is a store, the folder that holds it, or a job file; the default is "runs". Runs, models and registries that
    used the store from elsewhere are known to it; --runs names those that were moved since. Before it is deleted each
    item is looked at again under its lock, and kept if it has changed.
    """
    from dkrr.jobs.inspection import delete_garbage, find_garbage

    store, own = _store(path)

    def look() -> list[Garbage]:
        return find_garbage(store, [*own, *runs], kept_seconds=older_than)

    items = look()
    for item in items:
        click.echo(f"{size(item.num_bytes):>10}  {item.location}  ({item.reason})")
    total = size(sum(item.num_bytes for item in items))
    if not items:
        click.echo("nothing to delete")
    elif yes or (sys.stdin.isatty() and click.confirm(f"delete {total}?", err=True)):
        freed, kept = delete_garbage(items, look)
        click.echo(f"deleted {size(freed)}")
        for item in kept:
            click.echo(f"      kept  {item.location}  ({item.reason})")
    else:
        click.echo(f"{total} can be deleted with --yes")


def _store(path: str) -> tuple[str, list[str]]:
    """The store that a path or address means, and the run of a job file, if it is there."""
    if path.endswith(".toml"):
        from dkrr.jobs.spec import JobSpec

        job = JobSpec.load(path)
        return job.store, [job.directory] if children(job.directory) else []
    return (join(path, "store") if "store" in children(path) else path), []
