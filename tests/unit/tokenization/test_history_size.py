"""Which histories are rendered for an append, and how a rendering ends that nobody waits for."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest

from chat_tokenizer.encoder import Limit
from chat_tokenizer.errors import Stopped
from chat_tokenizer.histories import user
from chat_tokenizer.history_size import HistorySize, measured_limit
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import RenderOptions
from tests.support.tiny_templates import LOCAL, MESSAGE, chatml
from tests.unit.tokenization.in_memory import tokenizer_with

_QUADRATIC = chatml("{% for other in messages[1:] %}{% endfor %}" + MESSAGE)
_INDEXED = chatml("{% for i in range(1000) %}{% set first = messages[0] %}{% endfor %}" + MESSAGE)


@pytest.mark.parametrize(
    "cost, messages",
    [(lambda n: 1e-5 * n, 1024), (lambda n: 1e-6 * n * n, 128), (lambda n: 1.0, 64)],
)
def test_limit_is_learned_from_cpu_time(
    cost: Callable[[int], float], messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, template = [0.0], tokenizer_with(LOCAL)._template

    def text(messages: Sequence[Message], options: RenderOptions) -> str:
        clock[0] += cost(len(messages))
        return ""

    monkeypatch.setattr(template, "text", text)
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    assert measured_limit(template).messages == messages


def test_a_history_beyond_the_limit_in_messages_or_bytes_is_not_held() -> None:
    history = [user("12345678")] * 4
    assert HistorySize(4, 1000).holds(history)
    assert not HistorySize(3, 1000).holds(history)
    assert not HistorySize(4, 31).holds(history)


@pytest.mark.parametrize("template", [_QUADRATIC, _INDEXED])
def test_rendering_ends_where_nobody_waits(template: str) -> None:
    calls: Iterator[int] = count()
    history = [user("a"), {"role": "assistant", "content": "b"}] * 500
    tokenizer = tokenizer_with(template)
    with pytest.raises(Stopped):
        tokenizer.append([1], [user("c")], history=history, limit=Limit(None, lambda: next(calls) > 2_000))
    assert next(calls) < 3_000  # of a million
