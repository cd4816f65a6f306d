"""MkDocs hooks: pages that lie outside of docs/ join the site, and links between all pages are
rewritten to match.

In the repository a page links to files by their paths, so that links work where the code is read.
On the site, pages outside of docs/ stand under project/; links to files that are no pages become
plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/*.md",
    "examples/*/*.md",
    "outrider/demo/models/**/*.md",
)
LINK = re.compile(r"\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(
                File.generated(
                    config,
                    f"project/{path.relative_to(ROOT)}",
                    content=path.read_text(encoding="utf-8"),
                )
            )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of one page."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix("project/") if uri.startswith("project/") else DOCS / uri

    def link(found: re.Match[str]) -> str:
        return _link(found, source, uri, files)

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def _link(found: re.Match[str], source: Path, uri: str, files: Files) -> str:
    text, target = found.groups()
    path, hash_sign, anchor = target.partition("#")
    if "://" in target or target.startswith("mailto:") or not path:
        return found[0]
    file = (source.parent / path).resolve()
    if file.is_dir():
        file = file / "README.md"
    inside = file.is_relative_to(DOCS)
    page = str(file.relative_to(DOCS)) if inside else f"project/{file.relative_to(ROOT)}"
    if files.get_file_from_path(page) is None:
        return text
    return f"[{text}]({os.path.relpath(page, os.path.dirname(uri) or '.')}{hash_sign}{anchor})"
