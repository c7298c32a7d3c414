"""What the package index shows: README.md, whose links lead into this repository, with their text alone."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Readme(MetadataHookInterface):
    """The long description. An index has no docs/ beside it, and this project no address of its own to point to yet."""

    def update(self, metadata: dict) -> None:
        """Set `readme`: links and pictures within the repository become their text, addresses stay."""
        text = Path(self.root, "README.md").read_text("utf-8")
        text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*|<!--.*?-->\n", "", text)
        text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
