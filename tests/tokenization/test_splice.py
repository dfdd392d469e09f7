from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_model import END, TinyModel
from tokenization import ChatTokenizer, PrefixMismatch, replace_prefix_tokens

_EOS = 2
_IDS = st.lists(st.integers(3, 50))


@pytest.mark.parametrize(
    "model_prefix, template_prefix, template, expected",
    [
        # the example that NeMo-RL documents
        (
            [11, 12, 13, 40, 41, 220, 17, 2],
            [11, 12, 13, 40, 41, 1001, 2],
            [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41],
            [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41],
        ),
        # a turn that was cut off by its length gets its stop token
        ([11, 220, 17], [11, 1001, 2], [11, 1001, 2, 21], [11, 220, 17, 2, 21]),
        # the template writes something behind the stop token, which the model did not sample
        ([11, 220, 2], [11, 1001, 2, 198], [11, 1001, 2, 198, 21], [11, 220, 2, 198, 21]),
        # earlier turns hold stop tokens too: the last one counts
        ([5, 2, 6, 2, 7, 8, 2], [5, 2, 6, 2, 78, 2], [5, 2, 6, 2, 78, 2, 9], [5, 2, 6, 2, 7, 8, 2, 9]),
        # nothing to keep
        ([], [11, 1001, 2], [11, 1001, 2, 21], [11, 1001, 2, 21]),
    ],
)
def test_examples(
    model_prefix: list[int], template_prefix: list[int], template: list[int], expected: list[int]
) -> None:
    assert replace_prefix_tokens(_EOS, model_prefix, template_prefix, template) == expected


@given(_IDS, _IDS, _IDS, st.booleans())
def test_the_models_ids_come_first_and_the_new_ones_last(
    sampled: list[int], rendered: list[int], new: list[int], stopped: bool
) -> None:
    sampled = [1, *sampled]
    model_prefix = [*sampled, _EOS] if stopped else sampled
    template_prefix = [*rendered, _EOS]
    spliced = replace_prefix_tokens(_EOS, model_prefix, template_prefix, [*template_prefix, *new])
    assert spliced == [*sampled, _EOS, *new]


@pytest.mark.parametrize(
    "template_prefix, template, complaint",
    [
        ([11, 1001], [11, 1001, 21], "holds no stop token 2"),
        ([], [], "holds no stop token 2"),
        ([11, 1001, 2], [11, 1002, 2, 21], "differently"),
        ([11, 1001, 2], [11, 1001], "differently"),
    ],
)
def test_what_does_not_belong_together(
    template_prefix: list[int], template: list[int], complaint: str
) -> None:
    with pytest.raises(PrefixMismatch, match=complaint):
        replace_prefix_tokens(_EOS, [11, 220, 2], template_prefix, template)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: TinyModel) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_model.folder)


_QUESTION = {"role": "user", "content": "What is the weather?"}
_ANSWER = {"role": "assistant", "content": "It rains."}


def _splice(
    tokenizer: ChatTokenizer, sampled: list[int], history: list[dict[str, str]], end: int = END
) -> list[int]:
    prompt = tokenizer.render([_QUESTION])
    rendered = tokenizer.render(history, add_generation_prompt=False)
    return replace_prefix_tokens(
        tokenizer, [*prompt, *sampled, end], rendered, tokenizer.render([*history, _QUESTION])
    )


def test_with_a_tokenizer_the_turns_own_text_may_differ(tokenizer: ChatTokenizer) -> None:
    whole = tokenizer.render([_QUESTION, _ANSWER, _QUESTION])
    rendered = tokenizer.render([_QUESTION, _ANSWER], add_generation_prompt=False)
    behind = whole[len(rendered) - 1 :]
    assert _splice(tokenizer, [74, 75], [_QUESTION, _ANSWER]) == [
        *tokenizer.render([_QUESTION]),
        74,
        75,
        END,
        *behind,
    ]


def test_another_stop_token_stands_for_the_templates(tokenizer: ChatTokenizer) -> None:
    other = next(number for number in range(END) if number != END)
    knowing = replace(tokenizer, stop_ids=frozenset({END, other}))
    spliced = _splice(knowing, [74], [_QUESTION, _ANSWER], other)
    asked = len(tokenizer.render([_QUESTION]))
    assert spliced[asked : asked + 2] == [74, other]
    assert spliced[asked + 2] != END


@pytest.mark.parametrize(
    "history",
    [
        [{**_QUESTION, "content": "What is the time?"}, _ANSWER],
        [{"role": "system", "content": "Be brief."}, _QUESTION, _ANSWER],
        [_QUESTION, _ANSWER, _QUESTION, _ANSWER],
    ],
)
def test_edited_messages_are_noticed(tokenizer: ChatTokenizer, history: list[dict[str, str]]) -> None:
    with pytest.raises(PrefixMismatch):
        _splice(tokenizer, [74], history)
