"""The pages of the site that stand outside docs/, and the links to them: what GitHub shows, the site shows too.

Links in the pages are those of the repository, relative to the file they stand in. Pages from outside docs/ keep their
place in the repository, so only links that cross the border of docs/ change.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
OUTSIDE += [f"examples/{name}README.md" for name in ("", "arithmetic_lab/", "benchmarks/", "real_pair/")]
# In the site docs/ is the root, and README.md there would take the place of index.md.
PLACES = {"README.md": "repository.md"}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)]*)?\)")
CODE = re.compile(r"(^```.*?^```)", flags=re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/, and the files that any page links to."""
    for name in OUTSIDE:
        files.append(File.generated(config, PLACES.get(name, name), content=(ROOT / name).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for _, link, _ in LINK.findall(page.content_string):
            target = _in_repository(page.src_uri, link)
            if (
                target
                and os.path.isfile(ROOT / target)
                and not target.endswith(".md")
                and files.get_file_from_path(_in_site(target)) is None
            ):
                files.append(File.generated(config, _in_site(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the repository's links into the site's."""

    def site_link(match: re.Match[str]) -> str:
        text, link, anchor = match.groups(default="")
        target = _in_repository(page.file.src_uri, link)
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():  # GitHub lists a folder, a site cannot
            return text
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"[{text}]({posixpath.relpath(_in_site(target), start)}{anchor})"

    parts = CODE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(site_link, part) for number, part in enumerate(parts))


def _in_repository(page: str, link: str) -> str | None:
    """The file of the repository that a page's link leads to; None for a link that leads out, or nowhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    outside = {PLACES.get(name, name): name for name in OUTSIDE}
    source = outside.get(page, f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return target if os.path.exists(ROOT / target) else None


def _in_site(path: str) -> str:
    return PLACES.get(path, path.removeprefix("docs/"))
