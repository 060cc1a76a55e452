"""Makes the site of docs/ complete by itself, for mkdocs: see `hooks` in mkdocs.yml.

Links to files outside of docs/ lead to copies of them. What the theme would load from a network is a part of the site.
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


def on_files(files: Files, config: Any) -> Files:
    """Adds the scripts of others."""
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
        if target.startswith("docs/") or not (_ROOT / target).is_file():  # mkdocs says which of them leads nowhere
            return link[1]
        copy = f"source/{target}.txt"
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(_ROOT / target)))
        return posixpath.relpath(copy, folder)

    return _OUTWARD.sub(lead_to_copy, markdown)
