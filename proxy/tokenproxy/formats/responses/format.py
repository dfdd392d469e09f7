"""`POST /v1/responses` and `POST /v1/responses/compact` as wire formats of a turn."""

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import raw
from tokenproxy.base.http import Request
from tokenproxy.base.request import ChatRequest
from tokenproxy.formats.base import Format, NamedSession, apply_session, chat_request, visible_of
from tokenproxy.formats.responses.answer import CompactionTranslation, Keep, ResponsesTranslation
from tokenproxy.formats.responses.items import Item, messages_of
from tokenproxy.formats.responses.records import Recalled, resolved
from tokenproxy.formats.responses.request import ResponsesRequest, chat_fields
from tokenproxy.formats.translated import Translation

PATH = "/v1/responses"
COMPACT_PATH = "/v1/responses/compact"
COMPACT_PROMPT = """\
The conversation is about to be continued by another instance of you that sees only your summary of it. \
Write that summary now, as plain text and without calling tools. Include:
- what the user wants, with every requirement and preference that was stated
- what was done so far, and what was decided and why
- names, paths, commands, values and results that are needed to go on
- what remains to be done, next step first"""
"""The user message that asks for the summary."""


class ResponsesFormat(Format):
    """One request, with what was stored of its conversation."""

    def __init__(self, asked: ResponsesRequest, recalled: Recalled, keep: Keep) -> None:
        """`keep` stores the response."""
        self._asked = asked
        self._recalled = recalled
        self._keep = keep
        self._items: list[Item] = []

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """See `Format.parse`."""
        asked, recalled = self._asked, self._recalled
        self._items = resolved(asked.input, recalled.items)
        fields = chat_fields(asked)
        messages, tokens = messages_of(recalled.earlier, self._items, recalled.summaries)
        if not messages:
            raise BadRequest.of("input", "must not be empty: send at least one item")
        if asked.compact:
            messages.append({"role": "user", "content": COMPACT_PROMPT})
        if asked.read.instructions:
            messages.insert(0, {"role": "system", "content": asked.read.instructions})
            tokens = {index + 1: named for index, named in tokens.items()}
        fields["messages"] = raw(messages)
        visible = visible_of(fields)
        apply_session(fields, session)
        fields.pop("n", None)  # a response has one output
        return chat_request(
            request, fields, session, visible, tokens={at: tuple(named) for at, named in tokens.items()}
        )

    def translation(self, request: ChatRequest) -> Translation:
        """See `Format.translation`."""
        asked, items, recalled = self._asked, self._items, self._recalled
        if not asked.compact:
            return ResponsesTranslation(asked, items, recalled.chain, self._keep)
        if request.retry.path != COMPACT_PATH:
            return CompactionTranslation(asked, items, recalled.chain, self._keep)
        compaction = CompactionTranslation(asked, items, [], self._keep)
        compaction.kept = [item for item in (*recalled.earlier, *items) if item.get("role") == "user"]
        return compaction
