"""Prose out of Python files: their docstrings, which chapter 10's scripts use as text of another kind than code."""

import ast
from collections.abc import Iterable, Iterator

from shared.corpus import Document

SHORTEST = 80  # characters: a sentence or more


def prose_of(documents: Iterable[Document]) -> Iterator[str]:
    """Each docstring of a sentence or more, with an empty line after it. Files that are no Python are left out."""
    for document in documents:
        try:
            tree = ast.parse(document.content)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST:
                    yield text + "\n\n"
