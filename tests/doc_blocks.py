"""The code blocks of a document, for tests that run what the documentation shows."""

import re
from pathlib import Path


def python_blocks(path: str | Path) -> list[str]:
    """The contents of the blocks fenced as python, in order.

    Args:
        path: a Markdown file.

    Returns:
        The code of each block, with its last line break, without its fences.
    """
    return re.findall(
        r"^```python\n(.*?)^```$", Path(path).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
