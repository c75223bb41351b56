"""How the pages of this folder become a site: `make docs`.

Nothing is loaded from another host, neither by the build nor by the pages; search runs in the
browser, over an index that the build writes.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

from graphshard import __version__  # noqa: E402 (needs the path above)

project = "graphshard"
author = copyright = "graphshard contributors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "command_line",
    "plain_docstrings",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_extensions"]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are plain English: what stands in backticks is code, and nothing is marked up.
default_role = "code"
autodoc_member_order = "bysource"
# Types of torch and of this package have no pages to link to.
autodoc_typehints = "none"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"graphshard {version}"
html_copy_source = False
html_theme_options = {"footer_icons": []}
pygments_style = "default"
pygments_dark_style = "monokai"
copybutton_prompt_text = "$ "
