"""Placeholders of images are expanded exactly once, whichever form the client sends."""

import pytest

from chat_tokenizer.placeholders import PlaceholdersDiffer, Span, collapse, expand, find

_PAD = 9
_IDEFICS = [7, 8, _PAD, _PAD, _PAD, 7]
"""An image with ids of its own around the placeholder's."""
_QWEN = [_PAD] * 4
_SWAPPED = [5, 5, 5]
"""An image whose ids do not hold the placeholder."""


@pytest.mark.parametrize("image", [_IDEFICS, _QWEN, _SWAPPED, [_PAD]])
def test_single_and_expanded_placeholders_give_the_same_prompt(image: list[int]) -> None:
    single = [1, _PAD, 2, _PAD, 3]
    whole = [1, *image, 2, *image, 3]
    mixed = [1, *image, 2, _PAD, 3]
    spans = [Span(1, len(image)), Span(2 + len(image), len(image))]
    for ids in (single, whole, mixed):
        assert expand(ids, _PAD, [image, image]) == (whole, spans)
    assert find(whole, _PAD, [image, image]) == spans
    assert collapse(whole, _PAD, spans) == single


def test_adjacent_images() -> None:
    # two singles are also the beginning of one expanded image, but then the others are missing
    assert expand([1, _PAD, _PAD, 2], _PAD, [[_PAD] * 2, [_PAD] * 2])[0] == [1, *[_PAD] * 4, 2]
    # the first expanded and the second single, or the other way round: the same prompt
    assert expand([_PAD] * 3, _PAD, [[_PAD] * 2, [_PAD] * 2])[0] == [_PAD] * 4
    assert expand([_PAD, 1, _PAD, _PAD], _PAD, [[_PAD] * 2, [_PAD] * 2])[0] == [_PAD, _PAD, 1, _PAD, _PAD]


@pytest.mark.parametrize("ids", [[1, 2], [_PAD], [_PAD, _PAD, _PAD], [*_IDEFICS, _PAD, _PAD]])
def test_another_number_of_placeholders_is_refused(ids: list[int]) -> None:
    with pytest.raises(PlaceholdersDiffer, match="2 images"):
        expand(ids, _PAD, [_IDEFICS, _IDEFICS])
    with pytest.raises(PlaceholdersDiffer, match="not expanded"):
        find([1, _PAD, 2], _PAD, [_IDEFICS])
