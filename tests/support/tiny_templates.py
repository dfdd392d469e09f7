"""Chat templates for tests of what they append after: variations of ChatML."""

HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
MESSAGE = HEADER + "{{ m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def chatml(message: str = MESSAGE, after: str = "") -> str:
    """ChatML with another way to print a message `m`, and what comes between the messages and the prompt."""
    return "{% for m in messages %}" + message + "{% endfor %}" + after + PROMPT


LOCAL = chatml()
COUNTS_MESSAGES = chatml(after="{{ messages | length }}")
"""Depends on the history, which the proof finds."""
LOOKS_FOR_A_LENGTH = chatml(after="{% if (messages[0].content | length) == 41 %}{{ 'hidden' }}{% endif %}")
"""Depends on the history in a way that no proof tries: whether its first text has 41 characters."""
REFUTING_TEXT = "x" * 41

_CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
_THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_SAID = "{{ m.content }}" + _CALLS + "{{ '<|im_end|>\n' }}"
THINKS = chatml(HEADER + _THOUGHT + _SAID)
"""Keeps the reasoning of all turns."""
NEVER_THINKS = chatml(HEADER + _SAID)
THINKS_AFTER_LAST_USER = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + chatml(HEADER + "{% if loop.index0 > ns.last %}" + _THOUGHT + "{% endif %}" + _SAID)
)
