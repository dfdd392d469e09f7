"""Chat templates for tests of what they append after: variations of ChatML."""

_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

LOCAL = "{% for m in messages %}" + _TURN + "{% endfor %}" + _PROMPT
COUNTS_MESSAGES = "{% for m in messages %}" + _TURN + "{% endfor %}{{ messages | length }}" + _PROMPT
"""Depends on the history, which the proof finds."""
LOOKS_FOR_A_LENGTH = (
    "{% for m in messages %}"
    + _TURN
    + "{% endfor %}{% if (messages[0].content | length) == 41 %}{{ 'hidden' }}{% endif %}"
    + _PROMPT
)
"""Depends on the history in a way that no proof tries: whether its first text has 41 characters."""
REFUTING_TEXT = "x" * 41
