"""A page taken apart: its sections, its pictures, everything that it refers to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

__all__ = ["SECTIONS", "Page", "outside_references", "parse_page"]

SECTIONS = (
    "asked", "data", "time", "memory", "rate", "convergence", "residuals", "held-out", "plan", "reuse", "versions",
    "events",
)  # fmt: skip
_VOID = {"meta", "link", "br", "hr", "img", "input"}
_REFERS = {
    "href",
    "src",
    "srcset",
    "action",
    "data",
    "poster",
    "xlink:href",
    "formaction",
    "background",
    "ping",
    "cite",
}


@dataclass
class Page:
    """What a reader, or a program that reads aloud, finds."""

    text: str
    sections: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)
    pictures: list[dict[str, str]] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def count(self, tag: str) -> int:
        """How many elements of this kind there are."""
        return sum(name == tag for name, _ in self.tags)


class _Parser(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__(convert_charrefs=True)
        self.page = page
        self.open: list[str] = []
        self.section = ""
        self.picture: dict[str, str] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.page.tags.append((tag, found))
        if "id" in found:
            self.page.ids.append(found["id"])
        if tag == "section":
            self.section = found.get("id", "?")
            self.page.sections[self.section] = ""
        if tag in ("h1", "h2", "h3"):
            self.page.headings.append((int(tag[1]), ""))
        if tag == "svg":
            self.picture = {"labelled": found.get("aria-labelledby", ""), "role": found.get("role", "")}
            self.page.pictures.append(self.picture)
        if self.picture is not None and tag in ("title", "desc") and self.open[-1:] == ["svg"]:
            self.picture[f"{tag} id"] = found.get("id", "")
        if tag not in _VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.page.mistakes.append(f"</{tag}> at line {self.getpos()[0]} while {self.open[-3:]} are open")
            return
        self.open.pop()
        if self.section and tag in ("td", "th", "text", "p", "caption", "figcaption", "title", "desc"):
            self.page.sections[self.section] += " "
        if tag == "section":
            self.section = ""
        if tag == "svg":
            self.picture = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        if self.section:
            self.page.sections[self.section] += data
        if self.open and self.open[-1] in ("h1", "h2", "h3", "span") and self.page.headings:
            level, text = self.page.headings[-1]
            if any(name in self.open for name in ("h1", "h2", "h3")):
                self.page.headings[-1] = (level, text + data)
        if self.picture is not None and self.open[-2:] in (["svg", "title"], ["svg", "desc"]):
            self.picture[self.open[-1]] = self.picture.get(self.open[-1], "") + data


def parse_page(text: str) -> Page:
    """Read a page; what is not closed, or closed twice, is among its mistakes."""
    page = Page(text)
    parser = _Parser(page)
    parser.feed(text)
    parser.close()
    if parser.open:
        page.mistakes.append(f"{parser.open} are never closed")
    for name, words in page.sections.items():
        page.sections[name] = re.sub(r"\s+", " ", words).strip()
    return page


def outside_references(page: Page) -> list[str]:
    """Everything that a browser could fetch or run: addresses, scripts, handlers, styles that import."""
    found = []
    for tag, attributes in page.tags:
        if tag in (
            "script",
            "iframe",
            "object",
            "embed",
            "base",
            "form",
            "audio",
            "video",
            "img",
            "image",
            "foreignobject",
        ):
            found.append(f"<{tag}>")
        for name, value in attributes.items():
            if name in _REFERS and not value.startswith("#") and value != "data:,":
                found.append(f"{tag} {name}={value!r}")
            if name.startswith("on") or (name == "style" and "url(" in value):
                found.append(f"{tag} {name}={value!r}")
    for style in re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL):
        found += re.findall(r"url\([^)]*\)|@import[^;]*|@font-face", style)
    return found
