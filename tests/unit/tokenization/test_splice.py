from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizer import ChatTokenizer, PrefixMismatch, replace_prefix_tokens
from tests.support.tiny_model import END, TinyModel

_EOS = 2
_IDS = st.lists(st.integers(3, 50))


def test_the_example_of_nemo_rl() -> None:
    spliced = replace_prefix_tokens(_EOS, [11, 40, 220, 17, 2], [11, 40, 1001, 2], [11, 40, 1001, 2, 21, 22])
    assert spliced == [11, 40, 220, 17, 2, 21, 22]
    # without model ids the rendering stays as it is
    assert replace_prefix_tokens(_EOS, [], [11, 1001, 2], [11, 1001, 2, 21]) == [11, 1001, 2, 21]


@given(_IDS, _IDS, _IDS, st.booleans())
def test_result_is_model_ids_stop_token_new_ids(
    sampled: list[int], rendered: list[int], new: list[int], stopped: bool
) -> None:
    sampled = [1, *sampled]
    model_prefix = [*sampled, _EOS] if stopped else sampled
    template_prefix = [*rendered, _EOS]
    spliced = replace_prefix_tokens(_EOS, model_prefix, template_prefix, [*template_prefix, *new])
    assert spliced == [*sampled, _EOS, *new]


@pytest.mark.parametrize(
    "template_prefix, template, error",
    [
        ([11, 1001], [11, 1001, 21], "holds no stop token 2"),
        ([11, 1001, 2], [11, 1002, 2, 21], "differently"),
    ],
)
def test_mismatched_prefixes_are_rejected(
    template_prefix: list[int], template: list[int], error: str
) -> None:
    with pytest.raises(PrefixMismatch, match=error):
        replace_prefix_tokens(_EOS, [11, 220, 2], template_prefix, template)


_QUESTION = {"role": "user", "content": "What is the weather?"}
_ANSWER = {"role": "assistant", "content": "It rains."}


def test_other_stop_token_replaces_the_one_of_the_template(tiny_model: TinyModel) -> None:
    tokenizer = replace(ChatTokenizer.load(tiny_model.folder), stop_ids=frozenset({END, 0}))
    prompt, whole = tokenizer.render([_QUESTION]), tokenizer.render([_QUESTION, _ANSWER, _QUESTION])
    rendered = tokenizer.render([_QUESTION, _ANSWER], add_generation_prompt=False)
    # the sampled text may differ from the rendering
    spliced = replace_prefix_tokens(tokenizer, [*prompt, 74, 0], rendered, whole)
    assert spliced == [*prompt, 74, 0, *whole[len(rendered) - 1 :]]
    edited = tokenizer.render([{**_QUESTION, "content": "What is the time?"}, _ANSWER])
    with pytest.raises(PrefixMismatch):
        replace_prefix_tokens(tokenizer, [*prompt, 74, 0], edited, whole)
