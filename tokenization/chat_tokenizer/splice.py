"""Replaces the first part of a rendered history by the ids that the model consumed and sampled.

The contract is that of NeMo-RL's `required_prefix_token_ids`. The template renders the whole history, and
once more the part up to the last assistant turn. In the whole rendering, that part is replaced by the model's
ids. The splice is at the stop token that ends the part, because both renderings and the model's ids have it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chat_tokenizer.errors import PrefixMismatch

if TYPE_CHECKING:
    from chat_tokenizer.chat import ChatTokenizer


def replace_prefix_tokens(
    tokenizer_or_eos: "ChatTokenizer | int",
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """Replace the first part of `template_token_ids` by the ids that the model consumed and sampled.

    Example, with the stop token 2: the model's [11, 220, 17, 2], the template's prefix [11, 1001, 2] and its
    whole rendering [11, 1001, 2, 21, 22] give [11, 220, 17, 2, 21, 22].

    Args:
        tokenizer_or_eos: the tokenizer, or the id with which the template ends an assistant turn. With an id
            alone, edited messages are not detected, and no other stop token is recognised.
        model_prefix_token_ids: the ids consumed and sampled up to the end of the last assistant turn. The
            stop token is added if it is missing (a turn cut off by its token limit).
        template_prefix_token_ids: the template's rendering of the same messages.
        template_token_ids: the template's rendering of all messages; starts with the prefix.

    Returns:
        The model's ids, the stop token, and all ids that the template renders after it. Another stop token
        of the model at the end of the model's ids takes the place of the template's.

    Raises:
        PrefixMismatch: the template's prefix holds no stop token; or the whole rendering does not start with
            that prefix (the template rewrites its history); or a message that no model sampled has other
            text in the model's ids than in the rendering (it was edited).
        TemplateUnsupported: the text with which the tokenizer's template closes turns holds no added token.
    """
    if not model_prefix_token_ids:
        return list(template_token_ids)
    eos = tokenizer_or_eos if isinstance(tokenizer_or_eos, int) else tokenizer_or_eos.stop_id()
    cut = _end_of_last_turn(template_prefix_token_ids, template_token_ids, eos)
    kept = list(model_prefix_token_ids)
    other_stop_ids: frozenset[int] = frozenset()
    if not isinstance(tokenizer_or_eos, int):
        if tokenizer_or_eos.decode(template_prefix_token_ids[cut + 1 :]).strip():
            raise PrefixMismatch(
                "text follows the last stop token in the rendering of the earlier messages: "
                "end these messages with an assistant turn"
            )
        other_stop_ids = tokenizer_or_eos.stop_ids - {eos}
        _check_messages(tokenizer_or_eos, eos, kept, template_prefix_token_ids[: cut + 1])
    if kept[-1] in other_stop_ids:
        return kept + list(template_token_ids[cut + 1 :])
    if kept[-1] == eos:
        kept.pop()
    return kept + list(template_token_ids[cut:])


def _end_of_last_turn(prefix: Sequence[int], whole: Sequence[int], eos: int) -> int:
    """The index of the stop token that ends the last turn of the prefix, in both renderings.

    Raises:
        PrefixMismatch: there is none, or the renderings differ before it.
    """
    cut = _last_index(prefix, eos)
    if cut is None:
        raise PrefixMismatch(
            f"the rendering of the earlier messages holds no stop token {eos} to join the model's ids at: "
            "end these messages with an assistant turn"
        )
    if list(whole[: cut + 1]) != list(prefix[: cut + 1]):
        raise PrefixMismatch(
            "the template renders the earlier messages differently when later ones follow, so the end of the "
            "last assistant turn cannot be found: use a template that does not rewrite its history"
        )
    return cut


def _check_messages(
    tokenizer: "ChatTokenizer", eos: int, model: Sequence[int], template: Sequence[int]
) -> None:
    """Compare the text of messages that no model sampled: all text before the headers of assistant turns.

    The text after such a header may differ: it is the sampled text, which the splice keeps.

    Raises:
        PrefixMismatch: a message differs, or the number of messages does.
    """
    header = tokenizer.assistant_header()
    model_segments, template_segments = _segments(model, eos), _segments(template, eos)
    if len(model_segments) != len(template_segments):
        raise PrefixMismatch(
            f"the ids hold {len(model_segments)} closed messages, the rendering {len(template_segments)}: "
            "send the messages that led to the ids"
        )
    for number, (kept, rendered) in enumerate(zip(model_segments, template_segments, strict=True)):
        if kept == rendered:
            continue
        # ids may differ where the text does not: a model samples other merges than the tokenizer chooses
        kept_text, rendered_text = tokenizer.decode(kept), tokenizer.decode(rendered)
        if kept_text == rendered_text:
            continue
        kept_header, rendered_header = kept_text.rfind(header), rendered_text.rfind(header)
        before_header_equal = kept_text[:kept_header] == rendered_text[:rendered_header]
        if not header or min(kept_header, rendered_header) < 0 or not before_header_equal:
            raise PrefixMismatch(
                f"closed message {number} is {rendered_text[-80:]!r} in the messages and "
                f"{kept_text[-80:]!r} in the ids: send earlier messages as they were"
            )


def _segments(ids: Sequence[int], eos: int) -> list[list[int]]:
    """The ids between stop tokens; a last segment without a stop token counts as closed.

    Example, with the stop token 2: [[5], [6, 7]] of [5, 2, 6, 7].
    """
    segments: list[list[int]] = [[]]
    for token in ids:
        if token == eos:
            segments.append([])
        else:
            segments[-1].append(token)
    return segments if segments[-1] else segments[:-1]


def _last_index(ids: Sequence[int], token: int) -> int | None:
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] == token:
            return position
    return None
