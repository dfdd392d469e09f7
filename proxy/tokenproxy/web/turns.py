"""The routes of a turn, one for each wire format, and of the responses that `/v1/responses` stores."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import msgspec

from tokenproxy.base.errors import ApiError, BadRequest, EngineBroken, NotFound
from tokenproxy.base.fields import join, parse, raw
from tokenproxy.base.fields import read as read_field
from tokenproxy.base.http import Request, Response, json_response, query_value
from tokenproxy.base.types import Fields
from tokenproxy.engine.protocol import error_text, fetch
from tokenproxy.formats.base import Format
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.formats.responses.format import COMPACT_PATH, PATH, ResponsesFormat
from tokenproxy.formats.responses.items import is_response_id
from tokenproxy.formats.responses.records import ResponseRecord, recall
from tokenproxy.formats.responses.request import read_request
from tokenproxy.formats.translated import serve_early, translated_error
from tokenproxy.formats.trl import Prompt, TrlAnswer, batch_answer, parse_batch, turn_of
from tokenproxy.record.session_rules import count_refusal
from tokenproxy.record.store import DOCUMENTS, StoreError, session_id
from tokenproxy.record.store_time import StoreTime
from tokenproxy.turn.serve import serve_turn
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, StoreRoute, parse_bounded
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.parameters import named_session, session_name

_RENAMED = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of fields of a chat completion to those of the request that it was made of."""
_OUTLINE = msgspec.json.Decoder(Fields)
_AT_ONCE = 256
"""Prompts of one batch that are served at the same time: vLLM's default for `--max-num-seqs`."""
_DOCUMENTS_AT_ONCE = 256
_LARGE_BYTES = 65_536
"""A document of more stands under a name of its own, so that its size is known before it is read."""
_CONTENT = "/content"
"""What is added to the name of such a document for its content."""
_MOST_RECALLED_BYTES = 64 * 2**20
"""Of the large documents that one request names: as large as a body may be."""
_SILENCE_S = 15.0
"""Seconds of silence after which a stream is kept alive: Claude Code and Codex give up after 300 s."""


class TurnRoute(Route):
    """Serves the turns of one wire format."""

    key_scope = KeyScope.TURNS

    def __init__(self, wire_format: Format) -> None:
        self._format = wire_format
        self.path = wire_format.path
        self.summary = wire_format.summary
        self.openapi = wire_format.openapi

    @property
    def description(self) -> str:
        """What the OpenAPI page shows."""
        return type(self._format).__doc__ or ""

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The response to one turn."""
        wire_format, session = self._format, await named_session(request, services)
        rollout = session_id(request.tenant, session.ref.name) if session else ""
        try:
            chat = await parse_bounded(request, services, partial(wire_format.parse, request, session))
            chat = await services.model_aliases.map(chat, services.fleet)
        except ApiError as error:
            await count_refusal(services.store, rollout, error.status, error.message)
            raise

        async def serve() -> Response:
            try:
                response = await serve_turn(chat, services, translation)
            except ApiError as error:
                await count_refusal(services.store, rollout, error.status, error.message)
                raise
            if response.status >= 400:
                await count_refusal(
                    services.store, rollout, response.status, error_text(await response.read())
                )
            return response

        translation = wire_format.translation(chat)
        if translation is None:
            return await serve()
        translation.signer, translation.tenant = await services.history.echoes.signer(), chat.tenant
        translation.reasoning = chat.visible.reasoning
        if chat.stream:
            return await serve_early(serve, translation, _SILENCE_S)
        return await translated_error(await serve(), translation)


class MessagesRoute(TurnRoute):
    """Serves turns that are converted for the fleet's chat template."""

    async def answer(self, request: Request, services: Services, /) -> Response:
        """The message, or the events of its stream."""
        turn = TurnRoute(MessagesFormat(await services.fleet.served_model()))
        return await turn.answer(request, services)


class Responses(Route):
    """Serves a turn; reads before it what the request names, and stores the response after it."""

    path = PATH
    key_scope = KeyScope.TURNS
    summary = "Response, token-exact over turns"
    _compact = False

    async def answer(self, request: Request, services: Services, /) -> Response:
        """A response of OpenAI's Responses, whole or as a stream of events."""
        asked = await parse_bounded(
            request, services, lambda: read_request(request.body, compact=self._compact)
        )
        stored = _Stored(request, services)
        wire_format = ResponsesFormat(asked, await recall(asked, stored.read), stored.keep)
        try:
            return await TurnRoute(wire_format).answer(request, services)
        except BadRequest as error:
            error.param = _RENAMED.get(error.param or "", error.param)
            raise


class CompactResponses(Responses):
    """Replaces a conversation by a summary of it, which the model writes in an ordinary turn."""

    path = COMPACT_PATH
    summary = "A summary in place of a conversation"
    _compact = True


class _Stored:
    """The documents of one request's tenant."""

    def __init__(self, request: Request, services: Services) -> None:
        self._tenant = request.tenant
        self._key_session = request.key_session
        self._session = session_name(request, from_key=services.settings.session_from_key)
        self._services = services
        self._history = services.history

    async def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of these names that are stored, and can be read; of its session, if the key is for one.

        Raises StoreError.
        """
        asked = {session_id(self._tenant, name): name for name in names}
        if not asked:
            return {}
        store = self._history.store
        names = list(asked)
        documents: dict[str, bytes] = {}
        large: dict[str, int] = {}
        for start in range(0, len(names), _DOCUMENTS_AT_ONCE):
            found = await store.get(DOCUMENTS, names[start : start + _DOCUMENTS_AT_ONCE])
            for name, content in found.items():
                # a document is decoded later: here only its outline is checked
                outline = store.unreadable.read(f"{DOCUMENTS} {name}", _OUTLINE.decode, content)
                if outline is None or self._key_session not in ("", read_field(outline, "session", str)):
                    continue
                documents[asked[name]] = content
                if (size := read_field(outline, "large", int)) is not None:
                    large[name] = size
        if sum(large.values()) > _MOST_RECALLED_BYTES:
            most = _MOST_RECALLED_BYTES // 2**20
            raise BadRequest.of("input", f"names stored responses of more than {most} MiB: send fewer")
        for name in large:  # one at a time: others wait for the store meanwhile
            async with self._services.large_documents:
                contents = await store.get(DOCUMENTS, [name + _CONTENT])
            del documents[asked[name]]
            documents.update((asked[name], content) for content in contents.values())
        return documents

    async def keep(self, name: str, content: bytes) -> bool:
        """Store a document; False if that comes later, or after a failure, which is logged and counted."""
        try:
            store, document = self._history.store, session_id(self._tenant, name)
            keep_s = store.limits.max_age_s
            session = {"session": raw(self._session)} if self._session else {}
            if len(content) > _LARGE_BYTES:
                await store.put(DOCUMENTS, document + _CONTENT, content, keep_s=keep_s)
                content = join({**session, "large": raw(len(content))})
            elif session:
                content = join({**_OUTLINE.decode(content), **session})
            return await store.put(DOCUMENTS, document, content, keep_s=keep_s, before=None)
        except StoreError as error:
            error.report(self._history.metrics, "a response is not stored")
            return False


class OneResponse(StoreRoute):
    """Reads or deletes a stored response."""

    # vLLM's own template, letter for letter: a plugin's route replaces the one with an equal template
    path = "/v1/responses/{response_id}"
    methods = ("GET", "DELETE")
    summary = "A stored response"
    key_scope = reading_scope = KeyScope.TURNS  # who may sample may also read and delete what was sampled

    async def answer(self, request: Request, services: Services, /) -> Response:
        """GET: the response as its client got it. DELETE: `{"id", "object", "deleted"}`."""
        name = _name(request)
        stored = _Stored(request, services)
        if request.method == "DELETE":
            if request.key_session and name not in await stored.read([name]):
                raise _unknown(name)
            document = session_id(request.tenant, name)
            await services.store.put(DOCUMENTS, document + _CONTENT, None)
            if not await services.store.put(DOCUMENTS, document, None):
                raise _unknown(name)
            return json_response({"id": name, "object": "response", "deleted": True})
        if query_value(request, "stream", "false") == "true":
            raise BadRequest.of("stream", "is not supported: a stored response is complete")
        found = await stored.read([name])
        if name not in found:
            raise _unknown(name)
        return json_response(msgspec.json.decode(found[name], type=ResponseRecord).response)


def _name(request: Request) -> str:
    """The id of the response in a path. Raises NotFound if there is no response with such an id."""
    name = request.parameters["response_id"]
    if not is_response_id(name):
        raise _unknown(name)
    return name


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"Response with id '{name}' not found: never stored, deleted, or too old",
        param="response_id",
        code="response_not_found",
    )


class TrlBatch(Route):
    """A batch of prompts as TRL up to 1.10 sends it to `trl vllm-serve`; each prompt is one turn."""

    key_scope = KeyScope.TURNS

    def __init__(self, path: str, prompts: str) -> None:
        """`prompts`: the field that holds the prompts."""
        self.path = path
        self.summary = "A batch of prompts, for TRL up to 1.10"
        self._prompts = prompts

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"}`."""
        session = await named_session(request, services)
        batch = await parse_bounded(
            request, services, lambda: parse_batch(parse(request.body), self._prompts)
        )

        answers = [TrlAnswer(logprobs=batch.visible.logprobs) for _ in batch.prompts]
        gate = asyncio.Semaphore(_AT_ONCE)

        async def serve(prompt: Prompt, answer: TrlAnswer) -> None:
            async with gate:
                if prompt.is_text:
                    prompt = await _tokenise(prompt, request, services)
                turn = turn_of(prompt, batch, request, session)
                with StoreTime(self.store_seconds or services.settings.store_timeout_s):
                    response = await serve_turn(turn, services, answer)
                if response.status >= 400:
                    raise _Refused(response)

        try:
            async with asyncio.TaskGroup() as group:  # the first failure cancels the others
                for prompt, answer in zip(batch.prompts, answers, strict=True):
                    group.create_task(serve(prompt, answer))
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, _Refused):
                return first.response
            raise first from None
        return json_response(batch_answer(answers))


class _Refused(Exception):
    """An engine refused one prompt of a batch; its response is the client's."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"the engine responded {response.status}")
        self.response = response


async def _tokenise(prompt: Prompt, request: Request, services: Services) -> Prompt:
    """A text prompt as ids, with the special tokens that vLLM adds to text. Raises EngineBroken."""
    headers = [pair for pair in request.headers if pair[0] != b"accept-encoding"]
    body = join({"prompt": msgspec.Raw(prompt.raw)})
    call = Request("POST", "/tokenize", headers, body, repeatable=True)
    status, tokenised = await services.fleet.ask(lambda replica: fetch(replica.engine, call))
    try:
        tokens = msgspec.json.decode(tokenised, type=dict[str, msgspec.Raw])["tokens"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise EngineBroken(f"/tokenize returned status {status} and no tokens") from error
    return replace(prompt, raw=bytes(tokens))
