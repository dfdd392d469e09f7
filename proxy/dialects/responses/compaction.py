"""Compacting a conversation: the model summarises it in an ordinary turn, and the summary replaces it.

The client gets an item whose encrypted content names the stored summary.
"""

PROMPT = """\
The conversation is about to be continued by another instance of you that sees only your summary of it. \
Write that summary now, as plain text and without calling tools. Include:
- what the user wants, with every requirement and preference that was stated
- what was done so far, and what was decided and why
- names, paths, commands, values and results that are needed to go on
- what remains to be done, next step first"""
"""The user message that asks for the summary."""

_PREFIX = """\
The conversation so far was compacted. Another instance of you worked on it and left this summary; continue \
from there:"""


def summary_message(summary: str) -> str:
    """The user message that stands for a compacted conversation."""
    return f"{_PREFIX}\n\n{summary}"
