"""Where the tail of a turn is cut: the text before was sampled, or replaced by a token that was sampled."""

from dataclasses import dataclass

from tokenization.discovery import TurnTail
from tokenization.errors import TemplateUnsupported


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in the tail of a turn, whose own syntax is not part of the tail."""

    position: int
    stop_text: str = ""
    """The template's stop token that ends at `position`; empty if the model did not close the turn."""
    rewritten: bool = False
    """Whether the model sampled another token where the template prints `stop_text`."""


def cut_tail(turn_tail: TurnTail, last_id: int, *, stopped: bool) -> Cut:
    """Cut a tail after what the model sampled of it, given the last sampled id.

    Example: the tail `<|im_end|>\n<|im_start|>user...` is cut after `<|im_end|>` if that was sampled, or if
    another stop token was; if the turn was cut off, before it.

    Args:
        stopped: whether a stop token ended the turn. One that the template does not print after this turn
            stands for the template's own. It never stands for a token that opens the next message: where such
            a token alone ends the turn, nothing is replaced.

    Raises:
        TemplateUnsupported: a stop token ended the turn, and the template closes it with another than others;
            or a turn was cut off where the last id does not tell how much of the close was sampled.
    """
    tail, closing = turn_tail.tail, turn_tail.closing
    if not stopped and last_id in turn_tail.unclear_ids:
        raise TemplateUnsupported("the last id does not tell how much of the turn's close was sampled")
    # where the close holds no stop token, a token that opens the next message ends the turn
    opening = turn_tail.tokens if stopped and not turn_tail.has_stop else ()
    for token in [*(turn_tail.close_tokens or turn_tail.tokens[:1]), *opening]:
        if token.id == last_id:
            return Cut(token.end, tail.text[token.start : token.end])
    stopped = stopped or last_id == turn_tail.stop_if_last
    # a stop token that is also syntax of the turn, such as `</tool_call>`, does not replace the close
    if stopped and last_id not in turn_tail.syntax_ids and closing:
        return Cut(closing[-1].end, tail.text[closing[-1].start : closing[-1].end], rewritten=True)
    if stopped and turn_tail.unclear_stop is not None:
        stop = turn_tail.unclear_stop
        if last_id != stop.id:
            raise TemplateUnsupported("which token closes a turn depends on the conversation")
        return Cut(stop.end, tail.text[stop.start : stop.end])
    return Cut(0)
