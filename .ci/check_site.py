"""Check every link of a built site: `python .ci/check_site.py site`. It needs the standard library alone.

Links within the site must lead to a file, and to an anchor in it where they name one. Of links elsewhere only
the form is checked, as CI has no network; and no page may load anything from elsewhere.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img", "link", "script", "source", "iframe", "object"}


class Page(HTMLParser):
    """The anchors of a page, and what it links to and loads, each with its line."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[int, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src", "data") and (tag in LOADED or name == "href"):
                self.links.append((self.getpos()[0], tag, value or ""))


def fault_of(site: Path, pages: dict[Path, Page], path: Path, tag: str, link: str) -> str | None:
    """Return what is wrong with a link of the page at `path`, or None."""
    target = urlsplit(link)
    if target.scheme == "mailto" or link.startswith("data:"):
        return None
    if target.scheme or target.netloc:
        if tag in LOADED:
            return "is loaded from elsewhere"
        proper = target.scheme == "https" and "." in target.netloc and " " not in link
        return None if proper else "is no https link"
    base = site if target.path.startswith("/") else path.parent
    file = (base / unquote(target.path).lstrip("/")).resolve() if target.path else path
    if file.is_dir():
        file /= "index.html"
    if not file.is_file() or not file.is_relative_to(site):
        return "leads to no file of the site"
    if target.fragment and file in pages and unquote(target.fragment) not in pages[file].anchors:
        return "names an anchor that its page does not have"
    return None


def faults(site: Path) -> list[str]:
    """Return a sentence for each link of the site that is wrong."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no page"]
    for path, page in pages.items():
        # The page of a server for what it does not find has links from the root of wherever it is.
        for line, tag, link in page.links if path.name != "404.html" else ():
            if fault := fault_of(site, pages, path, tag, link):
                found.append(f"{path.relative_to(site)}:{line}: {link!r} {fault}")
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    sys.exit("\n".join(wrong) or None)
