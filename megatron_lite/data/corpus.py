"""A real text corpus that every Python installation carries: the standard library's sources and the language reference.

It lets the examples and tests train on text without a download. The order is fixed and the texts depend on the Python
release alone, not on where it is installed or on which packages are.
"""

import os
import pydoc_data.topics
import sysconfig
import tokenize
from collections.abc import Iterator

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
# written at build or install time, or by the distribution; topics.py is given topic by topic instead
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
SKIPPED_FILES = {"pydoc_data/topics.py"}


def python_library_texts() -> Iterator[tuple[str, str]]:
    """(name, text) of each topic of the language reference, then of each library source file, in sorted order."""
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield f"topics/{topic}", text
    root = sysconfig.get_path("stdlib")
    for name in _source_files(root):
        text = _read_source(os.path.join(root, *name.split("/")))
        if text:
            yield name, text


def _source_files(root: str) -> list[str]:
    """Names of the .py files below `root`, with "/" on every system, sorted."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        for file in files:
            name = file if inside == "." else f"{inside}/{file}"
            if file.endswith(".py") and not file.startswith(SKIPPED_PREFIXES) and name not in SKIPPED_FILES:
                names.append(name)
    return sorted(names)


def _read_source(path: str) -> str:
    """The text of a source file in the encoding it declares; nothing for one that is not valid source text."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
