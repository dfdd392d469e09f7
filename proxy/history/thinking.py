"""The thinking policy `template`: a prompt shows no reasoning that its rendering would leave out."""

from proxy.history.cache import CachedTurn
from proxy.history.conversation import Conversation
from proxy.turn.request import Rendering
from tokenization import ChatTokenizer
from tokenization.thinking import ends_thinking, hidden_reasoning


def shows_dropped_thinking(
    tokenizer: ChatTokenizer, turn: CachedTurn, conversation: Conversation, end: int, rendering: Rendering
) -> bool:
    """Whether the ids of a turn hold reasoning that the template would leave out of the next prompt.

    Args:
        conversation: the request's.
        end: index of the turn's message in it.

    Raises:
        InvalidMessages: the template refuses the messages.
    """
    messages = conversation.parse(0, len(conversation.raws))
    turns = [index for index in range(end + 1) if conversation.messages[index].assistant]
    thinking = {index for index, reasoning in zip(turns, turn.reasonings, strict=False) if reasoning}
    thinking |= {index for index in turns if ends_thinking(messages[index])}
    if not thinking:
        return False
    tools, kwargs = rendering.parse_tools(), rendering.parse_template_kwargs()
    hidden = hidden_reasoning(tokenizer, messages, thinking, tools=tools, template_kwargs=kwargs)
    root = turns[turn.rendered_turns]
    if not hidden or max(hidden) >= root:
        return bool(hidden)
    # the engine rendered these messages for the first turn, perhaps with reasoning that would now be left out
    rendered = {index for index in thinking if index < root}
    before = hidden_reasoning(tokenizer, messages[:root], rendered, tools=tools, template_kwargs=kwargs)
    return not hidden <= before
