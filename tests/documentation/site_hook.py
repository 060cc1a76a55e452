"""Makes the site of docs/ complete by itself, for mkdocs: see `hooks` in mkdocs.yml.

Pages of the root are pages of the site. Links to other files outside of docs/ lead to copies of them. What the theme
would load from a network is a part of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[2]
# Where `make docs` puts what it gets from npm.
_SCRIPTS = _ROOT / ".cache" / "site-scripts"
_OUTWARD = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
# Pages of the root, and the folder of the site in which they are.
_OF_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_ROOT_FOLDER = "project"
_RELATIVE = re.compile(r"(\]\(|src=\")(?![a-z]+:|#|/)([^)\s\"]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the root, and the scripts of others."""
    for name in _OF_ROOT:
        content = _RELATIVE.sub(_from_root_folder, (_ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, f"{_ROOT_FOLDER}/{name.lower()}", content=content))
    for script in ("mermaid.min.js", "iframe-worker.js"):
        files.append(File.generated(config, f"assets/{script}", abs_src_path=str(_SCRIPTS / script)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Leads links out of docs/ to copies, which have .txt behind their names so that browsers show them.

    Decisions are left out of the search.
    """
    folder = posixpath.dirname(page.file.src_uri)
    if folder == "decisions":
        page.meta["search"] = {"exclude": True}

    def lead_to_copy(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if target in _OF_ROOT:
            return posixpath.relpath(f"{_ROOT_FOLDER}/{target.lower()}", folder)
        if target.startswith("docs/") or not (_ROOT / target).is_file():  # mkdocs says which of them leads nowhere
            return link[1]
        copy = f"source/{target}.txt"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(_ROOT / target)))
        return posixpath.relpath(copy, folder)

    return _OUTWARD.sub(lead_to_copy, markdown)


def _from_root_folder(link: re.Match[str]) -> str:
    """A link of a page of the root, as it is in the folder of the site: to a page there, to docs/, or to a copy."""
    target = link[2]
    if target.partition("#")[0] in _OF_ROOT:
        return f"{link[1]}{target.lower()}"
    return f"{link[1]}../{target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'}"
