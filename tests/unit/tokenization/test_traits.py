import pytest

from chat_tokenizer.template import ContentFormat, detect_content_format

_MACRO = "{% macro show(text) %}{% for part in text %}{{ part.text }}{% endfor %}{% endmacro %}"


def _loop(body: str, messages: str = "messages") -> str:
    return f"{{% for m in {messages} %}}{body}{{% endfor %}}"


@pytest.mark.parametrize(
    "source, expected",
    [
        (_loop("{{ m.content }}"), "string"),
        (_loop("{% for part in m.content %}{{ part.text }}{% endfor %}"), "openai"),
        (_loop("{% for part in m.get('content') %}{{ part.text }}{% endfor %}"), "string"),
        (_loop("{% set content = m.content %}{% for part in content %}{% endfor %}"), "openai"),
        ("{% set rest = messages[1:] %}" + _loop("{% for p in m.content %}{% endfor %}", "rest"), "openai"),
        ("{% set a = messages %}{% set messages = a %}" + _loop("{{ m.content }}"), "string"),
        ("{% set ns.rest = messages %}" + _loop("{% for p in m.content %}{% endfor %}"), "string"),
        (_MACRO + _loop("{{ show(m.content) }}"), "openai"),
        (_MACRO.replace("text", "content") + _loop("{{ show(m.name) }}"), "string"),
        (_loop("{% generation %}{% for part in m.content %}{% endfor %}{% endgeneration %}"), "openai"),
        (_loop("{% for part in m.content %}{% break %}{% endfor %}"), "openai"),
        ("{{ " + "(" * 20_000, "string"),
    ],
)
def test_format_is_the_one_that_vllm_detects(source: str, expected: ContentFormat) -> None:
    assert detect_content_format(source) == expected
