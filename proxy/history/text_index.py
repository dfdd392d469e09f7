"""The index keys by which requests find a recorded turn by its text.

A turn is under several digests of its conversation, from the exact spelling to one that ignores what clients
drop or repair. `ids_index` has the keys of prompts that are ids.
"""

from proxy.history.conversation import Conversation
from proxy.history.scope import Scope
from proxy.history.store import IndexEntry
from tokenization import CanonicalMessage
from tokenization.canonical import extend

EXACT = "exact"
"""Kind of key: the conversation as it was spelled."""
LOOSE = "loose"
"""Kind of key: the conversation, ignoring in assistant messages reasoning, white space around text, and
arguments of calls that equal the tool's default."""
BARE = "bare"
"""Kind of key: as LOOSE, and without the arguments of the last message's tool calls."""
KINDS = (EXACT, LOOSE, BARE)
"""The kinds of keys by which turns are found, in the order of `text_keys`."""
CONTENT = "content"
"""Kind of key: the last message alone, or with the one before it if it is short. Explains a miss."""


def text_entries(
    scope: Scope, conversation: Conversation, message: CanonicalMessage, distinctive: bool, ids: bytes
) -> list[IndexEntry]:
    """The three index entries of a turn.

    Args:
        conversation: the messages of its request.
        message: the assistant's message.
        distinctive: see `ParsedMessage.distinctive`.
        ids: its `ids_digest`.
    """
    end = len(conversation.messages)
    before = conversation.loose_before(end)
    cut_off = any(argument[:1] == b"t" for argument in message.arguments)
    loose = (
        scope.key(BARE, extend(before, message.without_arguments))
        if cut_off
        else scope.key(LOOSE, extend(before, message.loose))
    )
    return [
        IndexEntry(scope.key(EXACT, extend(conversation.strict_before(end), message.strict)), ids),
        IndexEntry(loose, ids),
        IndexEntry(content_key(scope, conversation, end, message, distinctive)),
    ]


def text_keys(scope: Scope, conversation: Conversation, end: int) -> list[bytes]:
    """The keys, of each kind in `KINDS`, of a turn that ends at one message of a conversation."""
    parsed = conversation.messages[end]
    keys = [scope.key(EXACT, parsed.strict), scope.key(LOOSE, parsed.loose)]
    if parsed.message.arguments:
        before = conversation.loose_before(end)
        keys.append(scope.key(BARE, extend(before, parsed.message.without_arguments)))
    return keys


def content_key(
    scope: Scope, conversation: Conversation, index: int, message: CanonicalMessage, distinctive: bool
) -> bytes:
    """The key that explains a miss; see `CONTENT`."""
    before = b"" if distinctive or not index else conversation.messages[index - 1].message.loose
    return scope.key(CONTENT, extend(before, message.loose), explains=True)
