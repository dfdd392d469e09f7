import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import ChatTokenizer
from chat_tokenizer.history_size import HistorySize
from chat_tokenizer.proof import Locality
from tests.support.tiny_model import TinyModel
from tests.support.tiny_templates import LOCAL, LOOKS_FOR_A_LENGTH, REFUTING_TEXT
from tests.support.utils import wait_until
from tokenproxy.base.request import Rendering
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.appending import Auditor

Load = Callable[[str], ChatTokenizer]
_NEW = [{"role": "user", "content": "And then?"}]


@pytest.fixture
def load(tiny_model: TinyModel) -> Load:
    def loaded(template: str) -> ChatTokenizer:
        tokenizer = ChatTokenizer.load(tiny_model.folder, template)
        tokenizer.prove()
        tokenizer._discovery.computed = HistorySize(0, 0)
        return tokenizer

    return loaded


@pytest.fixture
def auditor(tmp_path: Path) -> Iterator[Auditor]:
    auditor = Auditor(Metrics(), tmp_path, 0.0)
    yield auditor
    auditor.close()


def _history(text: str, exchanges: int = 1) -> list[dict[str, Any]]:
    later = [{"role": "user", "content": "More"}, {"role": "assistant", "content": "I see."}] * exchanges
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}, *later]


def _audited(auditor: Auditor, result: str) -> float:
    return float(auditor._metrics.audits.labels(result)._value.get())


def test_a_difference_ends_local_appends(
    load: Load, auditor: Auditor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(LOOKS_FOR_A_LENGTH)
    history = _history(REFUTING_TEXT, 30)
    assert tokenizer.is_local(_NEW)
    assert "hidden" not in tokenizer.decode(tokenizer.append([1], _NEW, history=history).suffix_ids)
    with caplog.at_level(logging.ERROR, "tokenproxy"):
        auditor.consider(tokenizer, history, _NEW, Rendering())
        wait_until(lambda: _audited(auditor, "different") == 1)
    assert not tokenizer.is_local(_NEW)
    assert "hidden" in tokenizer.decode(tokenizer.append([1], _NEW, history=history).suffix_ids)
    wait_until(lambda: REFUTING_TEXT in caplog.text)
    # of the 62 messages only the first and the turn are left
    [message] = [each for each in caplog.messages if REFUTING_TEXT in each]
    assert message.count('"role"') == 3
    # a process that starts later knows it
    later = ChatTokenizer.load(tokenizer.source, LOOKS_FOR_A_LENGTH)
    assert later.prove(tmp_path).after_messages is Locality.HISTORY
    assert later.prove(tmp_path).after_results is Locality.NEW


def test_the_first_append_of_each_kind_is_audited(load: Load, auditor: Auditor) -> None:
    tokenizer = load(LOCAL)
    for _ in range(5):
        for history in (_history("Hi"), _history("Ho", 20)):
            for kwargs in (b"", b'{"enable_thinking": true}'):
                auditor.consider(tokenizer, history, _NEW, Rendering(template_kwargs=kwargs))
    wait_until(lambda: _audited(auditor, "same") == 4)
    auditor.consider(tokenizer, _history("Hi"), _NEW, Rendering(add_generation_prompt=False))
    wait_until(lambda: _audited(auditor, "same") == 5)
    tool = b'[{"type": "function", "function": {"name": "f", "parameters": {}}}]'
    auditor.consider(tokenizer, _history("Hi"), _NEW, Rendering(tools=tool))
    wait_until(lambda: _audited(auditor, "same") == 6)
