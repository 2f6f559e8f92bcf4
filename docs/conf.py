"""How Sphinx builds the site: ``make docs``. The pages are the Markdown files of this folder."""

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

from sphinx.application import Sphinx

import deepbregman

sys.path.insert(0, str(Path(__file__).parent))
from reference import describe_command_line, describe_python, describe_signature, list_public_names

project = "deepbregman"
author = "The deepbregman maintainers"
copyright = author
version = release = deepbregman.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["examples"]  # an example of a report, not pages
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"deepbregman {version}"
html_show_copyright = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "none"  # of a block that names no language

myst_heading_anchors = 3  # as GitHub makes them, so that a link works in both places
myst_enable_extensions = ["colon_fence"]
# Files outside of this folder are shown by the place where the repository is; by default that is
# the checkout itself, seen from build/docs.
REPOSITORY = os.environ.get("REPOSITORY", "../..").rstrip("/")
myst_url_schemes = {
    "http": None,
    "https": None,
    "mailto": None,
    "repository": {"url": REPOSITORY + "/{{path}}"},
}

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
suppress_warnings = ["config.cache"]

GENERATED = {"command_line": describe_command_line, "python": describe_python}


def prepare_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Add what is generated to a page, and send links out of this folder to the repository."""
    text = re.sub(r"(?<!!)(\[[^\]]*\])\(\.\./", r"\1(repository:", source[0])
    source[0] = text + GENERATED[name]() if name in GENERATED else text


def shorten_signature(
    app: Sphinx, what: str, name: str, called: Any, options: Any, signature: str, returned: str
) -> tuple[str, str] | None:
    """Show the types of a function that is also a command as a program gives them."""
    if signature is None or "Annotated" not in signature:
        return None
    return describe_signature(called), returned


def simplify_fields() -> None:
    """Show the types of fields without the rules that are attached to them."""
    public = (getattr(deepbregman, name) for name in list_public_names())
    for kind in filter(dataclasses.is_dataclass, public):
        kind.__annotations__ = kind.__init__.__annotations__ = get_type_hints(kind)


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    simplify_fields()
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-signature", shorten_signature)
