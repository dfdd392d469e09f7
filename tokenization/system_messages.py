"""Whether a chat template takes system messages inside a conversation, decided as vLLM decides it.

vLLM's route for Anthropic's messages (vllm/entrypoints/anthropic/serving.py) renders such a conversation
with the source alone: variables of the tokenizer and functions of its renderer are undefined there.
"""

import jinja2
import jinja2.ext
import jinja2.sandbox

_FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_CONVERSATION = [
    {"role": "system", "content": "t"},
    {"role": "user", "content": "t"},
    {"role": "system", "content": "t"},
    {"role": "user", "content": "t"},
]


def takes_later_system(source: str) -> bool:
    """Whether the template renders a system message after the first message; not if it fails."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    try:
        environment.from_string(source).render(messages=_CONVERSATION, add_generation_prompt=False)
    except _FAILURES:
        return False
    return True
