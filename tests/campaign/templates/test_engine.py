"""The renderer of the oracle against vLLM itself."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.templates.conversations import FURTHER_SHAPES
from tests.support.templates.corpus import corpus, fetched_template
from tests.support.templates.engine import convert, fold_developer, recorded_digests
from tests.support.templates.record_formats import detected_digests
from tests.support.templates.sample import sample_names
from tests.support.templates.shapes import SHAPES, Message


def test_recorded_content_formats_are_those_of_vllm() -> None:
    """If this fails, run `python -m tests.support.templates.record_formats`."""
    templates = [*corpus(("trl",)), *map(fetched_template, sample_names())]
    recorded = {template.digest for template in templates} & recorded_digests()
    assert recorded == detected_digests(templates)


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "text"])
def test_messages_are_converted_as_vllm_converts_them(parts: bool) -> None:
    for shape in [*SHAPES, *FURTHER_SHAPES]:
        messages = [*shape.history, *shape.new]
        assert convert(messages, parts=parts) == _converted_by_vllm(messages, parts), shape.name


@pytest.mark.parametrize("parts", [True, False], ids=["parts", "text"])
def test_developer_messages_are_folded_as_vllm_folds_them(parts: bool) -> None:
    from vllm.renderers.hf import _consolidate_system_messages, _convert_developer_to_system

    shapes = [shape for shape in FURTHER_SHAPES if "developer" in shape.name]
    assert shapes
    for shape in shapes:
        messages: Any = convert([*shape.history, *shape.new], parts=parts)
        expected = _consolidate_system_messages(_convert_developer_to_system(copy.deepcopy(messages)))
        assert fold_developer(messages) == expected, shape.name


def _converted_by_vllm(messages: list[Message], parts: bool) -> list[Message]:
    from vllm.renderers.chat_utils import parse_chat_messages

    messages = copy.deepcopy(messages)
    for message in messages:
        # vLLM's request model does this before it renders
        if "reasoning_content" in message:
            message.setdefault("reasoning", message.pop("reasoning_content"))
    model: Any = SimpleNamespace(
        enable_prompt_embeds=False, multimodal_config=None, allowed_local_media_path=""
    )
    conversation, _, _ = parse_chat_messages(messages, model, "openai" if parts else "string")
    return [dict(message) for message in conversation]
