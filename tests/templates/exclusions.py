"""Conversations that a template cannot render, each with the reason. A test checks that all still hold.

The matrix runs all other conversations.
"""

from tests.templates.oracle import Reason
from tests.templates.shapes import SHAPES

_CALLS = frozenset(shape.name for shape in SHAPES if shape.kind == "call")
_PARALLEL = frozenset(name for name in _CALLS if name.startswith("parallel"))
_RESULTS = _CALLS | {"content, then a result", "content after results", "an edited call and its result"}
_GEMMA4 = ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")

_DECLARED: tuple[tuple[tuple[str, ...], frozenset[str], Reason, str], ...] = (
    (
        ("gemma", "gemma3", "cohere", "llava_next"),
        _RESULTS,
        Reason.REFUSED,
        "allow only user and assistant messages, in alternation",
    ),
    (
        ("gemma",),
        frozenset({"content after system", "content, tools declared", "an edited answer with reasoning"}),
        Reason.REFUSED,
        "has no system role",
    ),
    (
        ("cohere2",),
        frozenset(
            {
                *("content after results", "call after results", "call in a second round"),
                *("an edited call and its result", "after a call, an edited call"),
            }
        ),
        Reason.REFUSED,
        "requires a user message between two assistant turns",
    ),
    (
        ("cohere2",),
        _CALLS - {"call after results", "call in a second round", "after a call, an edited call"},
        Reason.TURN_NOT_PRINTED,
        "prints no tool calls",
    ),
    (
        ("phi3", "phi3_5", "idefics3", "smolvlm"),
        frozenset({"an edited call and its result"}),
        Reason.NEW_NOT_PRINTED,
        "print no tool results",
    ),
    (
        ("deepseekv3", "llama3_1", "llama3_2", "muse_glimmer"),
        frozenset({"after a call, an edited call"}),
        Reason.NEW_NOT_PRINTED,
        "print no text next to a call",
    ),
    (
        ("cohere2", "phi3", "phi3_5", "idefics3", "smolvlm"),
        frozenset({"content, then a result"}),
        Reason.NEW_NOT_PRINTED,
        "print no tool results",
    ),
    (
        ("phi3", "phi3_5", "idefics3", "smolvlm", "qwen2_5_vl", "lfm2", "llama3"),
        _CALLS,
        Reason.TURN_NOT_PRINTED,
        "print no tool calls",
    ),
    (
        ("deepseek_r1_distill",),
        _CALLS,
        Reason.TURN_NOT_PRINTED,
        "prints tool calls only if the content is null, but engines send an empty text",
    ),
    (
        ("llama3_1", "llama3_2"),
        _PARALLEL,
        Reason.REFUSED,
        "allow only one tool call in a turn",
    ),
    (("gptoss",), _PARALLEL, Reason.TURN_NOT_PRINTED, "prints only the first tool call of a turn"),
    (
        ("gptoss",),
        frozenset({"content, then a result"}),
        Reason.REFUSED,
        "requires a call before a result",
    ),
    (
        _GEMMA4,
        frozenset({"content, then a result"}),
        Reason.NEW_NOT_PRINTED,
        "print results at the call they belong to",
    ),
    (
        _GEMMA4,
        frozenset({"content and call"}),
        Reason.REORDERED,
        "print the content of a turn after the results of its calls",
    ),
)

EXCLUDED: dict[tuple[str, str], tuple[Reason, str]] = {
    (template, shape): (reason, why)
    for templates, shapes, reason, why in _DECLARED
    for template in templates
    for shape in shapes
}
"""Maps (template, shape) to the reason: a code that the test checks, and a sentence for the reader."""
