"""Keep a model's own tokens in a history that was rendered from text.

The contract is NeMo-RL's `required_prefix_token_ids`: a template renders the whole history and, once
more, only the part up to the last assistant turn; the rendering of that part is replaced by the ids the
model really consumed and sampled. The cut is made at the stop token that ends the part, because it
is the one token both sides are sure to share.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenization.errors import PrefixMismatch

if TYPE_CHECKING:
    from tokenization.chat import ChatTokenizer


def replace_prefix_tokens(
    tokenizer_or_eos: "ChatTokenizer | int",
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """`template_token_ids` with its first part replaced by the model's own ids.

    Args:
        tokenizer_or_eos: the tokenizer, or the token with which the template ends an assistant turn. Only a
            tokenizer can tell that an earlier message was edited, and knows other stop tokens.
        model_prefix_token_ids: ids consumed and sampled up to the end of the last assistant turn;
            it may lack the stop token (a turn cut off by its length), which is then added.
        template_prefix_token_ids: the template's rendering of the same messages.
        template_token_ids: the template's rendering of all messages; begins with the former.

    Returns:
        the model's ids, the stop token, and everything the template puts behind it. A stop token other than
        the template's stands for it.

    Raises:
        PrefixMismatch: the template's prefix holds no stop token; or the whole rendering does not
            begin with it (the template rewrites its history); or a message that no model sampled has
            another text in the model's ids than in the rendering (it was edited).
        TemplateUnsupported: the tokenizer's template closes turns with no token of its own.
    """
    if not model_prefix_token_ids:
        return list(template_token_ids)
    eos = tokenizer_or_eos if isinstance(tokenizer_or_eos, int) else tokenizer_or_eos.stop_id()
    cut = _last_index(template_prefix_token_ids, eos)
    if cut is None:
        raise PrefixMismatch(
            f"the template ends no turn with token {eos}: nowhere to join the model's own tokens"
        )
    if list(template_token_ids[: cut + 1]) != list(template_prefix_token_ids[: cut + 1]):
        raise PrefixMismatch(
            "the template renders the earlier messages differently when later ones follow, "
            "so the place of the last assistant turn is not certain"
        )
    kept = list(model_prefix_token_ids)
    others: frozenset[int] = frozenset()
    if not isinstance(tokenizer_or_eos, int):
        if tokenizer_or_eos.decode(template_prefix_token_ids[cut + 1 :]).strip():
            raise PrefixMismatch("the last stop token in the rendering does not end the last assistant turn")
        others = tokenizer_or_eos.stop_ids - {eos}
        _check_messages(tokenizer_or_eos, eos, kept, template_prefix_token_ids[: cut + 1])
    if kept[-1] in others:
        return kept + list(template_token_ids[cut + 1 :])
    if kept[-1] == eos:
        kept.pop()
    return kept + list(template_token_ids[cut:])


def _check_messages(
    tokenizer: "ChatTokenizer", eos: int, model: Sequence[int], template: Sequence[int]
) -> None:
    """Compare, as text, what no model sampled: everything before the headers of assistant turns.

    What stands behind such a header may differ, that is what the model's own tokens are kept for.
    """
    header = tokenizer.assistant_header()
    ours, theirs = _segments(model, eos), _segments(template, eos)
    if len(ours) != len(theirs):
        raise PrefixMismatch(f"the ids hold {len(ours)} closed turns, and the rendering {len(theirs)}")
    for number, (sampled, rendered) in enumerate(zip(ours, theirs, strict=True)):
        if sampled == rendered:
            continue
        left, right = tokenizer.decode(sampled), tokenizer.decode(rendered)
        if left == right:
            continue
        at, there = left.rfind(header), right.rfind(header)
        if not header or min(at, there) < 0 or left[:at] != right[:there]:
            raise PrefixMismatch(
                f"closed turn {number} is {right[-80:]!r} in the messages and {left[-80:]!r} in the ids: "
                "an earlier message was edited"
            )


def _segments(ids: Sequence[int], eos: int) -> list[list[int]]:
    """The ids between stop tokens; a last one that was cut off counts as closed."""
    segments: list[list[int]] = [[]]
    for token in ids:
        if token == eos:
            segments.append([])
        else:
            segments[-1].append(token)
    return segments if segments[-1] else segments[:-1]


def _last_index(ids: Sequence[int], wanted: int) -> int | None:
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] == wanted:
            return position
    return None
