import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenization import PrefixMismatch, replace_prefix_tokens

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
        ([11, 1001], [11, 1001, 21], "ends no turn with token 2"),
        ([], [], "ends no turn with token 2"),
        ([11, 1001, 2], [11, 1002, 2, 21], "differently"),
        ([11, 1001, 2], [11, 1001], "differently"),
    ],
)
def test_what_does_not_belong_together(
    template_prefix: list[int], template: list[int], complaint: str
) -> None:
    with pytest.raises(PrefixMismatch, match=complaint):
        replace_prefix_tokens(_EOS, [11, 220, 2], template_prefix, template)
