"""Keep a model's own tokens in a history that was rendered from text.

The contract is NeMo-RL's `required_prefix_token_ids`: a template renders the whole history and, once
more, only the part up to the last assistant turn; the rendering of that part is replaced by the ids the
model really consumed and sampled. The cut is made at the stop token that ends the part, because it
is the one token both sides are sure to share.
"""

from collections.abc import Sequence

from tokenization.errors import PrefixMismatch


def replace_prefix_tokens(
    eos_token_id: int,
    model_prefix_token_ids: Sequence[int],
    template_prefix_token_ids: Sequence[int],
    template_token_ids: Sequence[int],
) -> list[int]:
    """`template_token_ids` with its first part replaced by the model's own ids.

    Args:
        eos_token_id: the token with which the template ends an assistant turn.
        model_prefix_token_ids: ids consumed and sampled up to the end of the last assistant turn;
            it may lack the stop token (a turn cut off by its length), which is then added.
        template_prefix_token_ids: the template's rendering of the same messages.
        template_token_ids: the template's rendering of all messages; begins with the former.

    Returns:
        the model's ids, the stop token, and everything the template puts behind it.

    Raises:
        PrefixMismatch: the template's prefix holds no stop token, or the whole rendering does not
            begin with it (an earlier message changed, or the template rewrites its history).
    """
    if not model_prefix_token_ids:
        return list(template_token_ids)
    cut = _last_index(template_prefix_token_ids, eos_token_id)
    if cut is None:
        raise PrefixMismatch(
            f"the template ends no turn with token {eos_token_id}: nowhere to join the model's own tokens"
        )
    if list(template_token_ids[: cut + 1]) != list(template_prefix_token_ids[: cut + 1]):
        raise PrefixMismatch(
            "the template renders the earlier messages differently when later ones follow, "
            "so the place of the last assistant turn is not certain"
        )
    kept = list(model_prefix_token_ids)
    if kept[-1] == eos_token_id:
        kept.pop()
    return kept + list(template_token_ids[cut:])


def _last_index(ids: Sequence[int], wanted: int) -> int | None:
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] == wanted:
            return position
    return None
