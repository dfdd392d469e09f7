"""Load the tokenizer of each served model once, and compare it with every engine that serves the model.

The proxy needs the tokenizer to append messages to ids. A tokenizer that differs from the engine's (another
template, other defaults) would produce prompts that the engine never renders. So every engine renders a few
conversations, and on any difference appending is refused with the reason. An engine does not report which
content format it runs with (`--chat-template-content-format`): it is the one with which all renderings agree.
"""

import asyncio
import gc
import logging
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from chat_tokenizer import ChatTokenizer, TokenizationError
from chat_tokenizer.traits import ContentFormat
from tokenproxy.base.errors import Unsupported
from tokenproxy.engine.discovery import Model
from tokenproxy.engine.protocol import Engine, examine
from tokenproxy.engine.token_in import json_request

log = logging.getLogger("tokenproxy")

_TOOL_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_IN_PARTS = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]


def _message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


_QUESTION, _ANSWER = _message("user", "What is 2 + 2?"), _message("assistant", "It is 4.")
_CALL = _message("assistant", "", tool_calls=[_TOOL_CALL])
_RESULT = _message("tool", "4", tool_call_id="call00001")
_SYSTEM, _DEVELOPER = _message("system", "Be brief."), _message("developer", "Be brief.")
_REQUESTS: list[dict[str, Any]] = [
    {"messages": [_QUESTION]},
    {"messages": [_message("user", "What is 2 + 2?\n"), _ANSWER, _message("user", " Grüße,  in words: 四?")]},
    {"messages": [_QUESTION, _CALL, _RESULT]},
    # the tool lacks a description, which engines fill in
    {"messages": [_QUESTION], "tools": [_TOOL]},
    # content as text or as parts
    {"messages": [_message("user", _IN_PARTS)]},
    {"messages": [_message("system", _IN_PARTS), _QUESTION]},
    # messages that engines may merge into the first
    {"messages": [_DEVELOPER, _QUESTION]},
    {"messages": [_SYSTEM, _QUESTION, _ANSWER, _message("developer", _IN_PARTS), _QUESTION]},
    {"messages": [_QUESTION, _ANSWER, _SYSTEM, _QUESTION]},
]
"""Rendered by the engine, and compared with it. A conversation that the engine refuses is skipped."""
_CONTENT_FORMATS: tuple[ContentFormat, ...] = ("string", "openai")


class _Rendered(msgspec.Struct):
    tokens: list[int]


class Tokenizers:
    """Loads each tokenizer once, for all engines that serve its model."""

    def __init__(
        self,
        source: str | None = None,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        content_format: ContentFormat | None = None,
        default_template_kwargs: Mapping[str, Any] | None = None,
        proof_folder: Path | None = None,
    ) -> None:
        """Arguments are those of `ChatTokenizer.load`; None leaves it to the model and its engine.

        `proof_folder` is the folder for proofs about chat templates; None keeps them in memory.
        """
        self._source = source
        self._load_one = partial(
            ChatTokenizer.load,
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
            content_format=content_format,
            default_template_kwargs=default_template_kwargs,
        )
        self._other_formats = _CONTENT_FORMATS if content_format is None else ()
        self._proof_folder = proof_folder
        self._loading: dict[str, asyncio.Task[list[ChatTokenizer]]] = {}
        self._examined: dict[int, ChatTokenizer] = {}

    async def find(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        """The tokenizer of the model that an engine serves, compared with that engine.

        Raises:
            Unsupported: the tokenizer cannot be loaded, or renders other ids than the engine.
            ApiError: the engine does not respond.
        """
        source = self._source or (model.root if model else None)
        if source is None:
            raise Unsupported(
                "appending needs the model's tokenizer, and the engine does not report which model it "
                "loaded: set `tokenizer` to the model's folder or hub name",
                param="append_messages",
                code="no_tokenizer",
            )
        if source not in self._loading:
            self._loading[source] = asyncio.create_task(asyncio.to_thread(self._load, source))
        try:
            candidates = await asyncio.shield(self._loading[source])
        except Exception as error:
            # the boundary of loading: a model's files or the hub may raise anything. The request gets the
            # reason, and the next one loads again
            self._loading.pop(source, None)
            raise Unsupported(
                f"appending needs the model's tokenizer: {error}; set `tokenizer` to a folder with it",
                param="append_messages",
                code="no_tokenizer",
            ) from error
        tokenizer = await _find_alike(candidates, engine)
        if id(tokenizer) not in self._examined:
            self._examined[id(tokenizer)] = tokenizer
            # a daemon, because the end of the process must not wait for a proof
            threading.Thread(target=self._prove, args=(tokenizer,), name="prove", daemon=True).start()
        return tokenizer

    def _load(self, source: str) -> list[ChatTokenizer]:
        """The tokenizer; if no content format is configured, followed by one with each format."""
        tokenizer = self._load_one(source)
        # a vocabulary and the libraries that read it are a million objects that live as long as the process:
        # a full garbage collection that visits them blocks the event loop for 0.2 s
        gc.freeze()
        return [tokenizer, *map(tokenizer.with_content_format, self._other_formats)]

    def _prove(self, tokenizer: ChatTokenizer) -> None:
        try:
            proof = tokenizer.prove(self._proof_folder)
        except Exception:  # the boundary of the thread: without a proof whole histories are rendered
            log.exception("the chat template of %s could not be examined", tokenizer.source)
            return
        log.info(
            "chat template of %s: the text after a turn depends on the %s, after tool results on the %s%s",
            tokenizer.source,
            proof.after_messages,
            proof.after_results,
            f" ({proof.reason})" if proof.reason else "",
        )


async def _find_alike(candidates: list[ChatTokenizer], engine: Engine) -> ChatTokenizer:
    """The first tokenizer that renders the same ids as the engine.

    Raises:
        Unsupported: there is none, or no rendering to compare.
    """
    renderings = [(request, ids) for request in _REQUESTS if (ids := await _rendered(engine, request))]
    if not renderings:
        raise Unsupported(
            f"the engine {engine.name} renders no conversation to compare the tokenizer with: "
            "its /tokenize route and chat template must accept a conversation",
            param="append_messages",
            code="tokenizer_unchecked",
        )
    for candidate in candidates:
        if await asyncio.to_thread(_agrees, candidate, renderings):
            return candidate
    raise Unsupported(
        f"the tokenizer or template in {candidates[0].source!r} renders other ids than the engine "
        f"{engine.name}: set `tokenizer` and `chat_template` to what the engine uses",
        param="append_messages",
        code="tokenizer_mismatch",
    )


async def _rendered(engine: Engine, request: dict[str, Any]) -> list[int] | None:
    """The ids to which an engine renders a conversation; None if it refuses the request.

    Raises:
        ApiError: the engine does not respond.
    """
    status, body = await examine(engine, json_request("/tokenize", request))
    if status != 200:
        return None
    try:
        return msgspec.json.decode(body, type=_Rendered).tokens
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _agrees(tokenizer: ChatTokenizer, renderings: list[tuple[dict[str, Any], list[int]]]) -> bool:
    """Whether a tokenizer renders every conversation as the engine does."""
    try:
        return all(
            tokenizer.render(request["messages"], tools=request.get("tools")) == engine_ids
            for request, engine_ids in renderings
        )
    except TokenizationError:  # a template that refuses what the engine renders is another one
        return False
