"""The tokenizers of the models that engines serve: loaded once, and checked against the engine.

Appending needs a tokenizer here. One that differs from the engine's (another template, other defaults)
would make prompts that the engine itself would never render, so each engine is asked to
render a conversation, and on any difference appending is refused with the reason.
"""

import asyncio
import gc
import logging
from typing import Any

import msgspec

from proxy.engine.discovery import Model, ask
from proxy.engine.protocol import Engine
from proxy.engine.token_in import json_call
from proxy.errors import EngineBroken, Unsupported
from tokenization import ChatTokenizer, TokenizationError

log = logging.getLogger("tokenproxy")

_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
_CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "What is 2 + 2?\n"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": " Grüße,  in words: 四?"},
    ],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "4"},
    ],
]
"""Rendered here and by the engine; not all templates take all of them."""


class _Rendered(msgspec.Struct):
    tokens: list[int]


class Tokenizers:
    """Loads each tokenizer once, whatever the number of engines that serve its model."""

    def __init__(
        self,
        source: str | None = None,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        self._source = source
        self._chat_template = chat_template
        self._trust_remote_code = trust_remote_code
        self._revision = revision
        self._loading: dict[str, asyncio.Task[ChatTokenizer]] = {}

    async def for_engine(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        """The tokenizer of the model an engine serves, checked against that engine.

        Raises:
            Unsupported: it cannot be loaded here, or it renders other ids than the engine.
        """
        source = self._source or (model.root if model else None)
        if source is None:
            raise Unsupported(
                "appending needs the model's tokenizer, and the engine does not say which model it "
                "loaded: set `tokenizer` to the model's folder or hub name",
                param="append_messages",
                code="no_tokenizer",
            )
        if source not in self._loading:
            self._loading[source] = asyncio.create_task(asyncio.to_thread(self._load, source))
        try:
            tokenizer = await asyncio.shield(self._loading[source])
        except Exception as error:
            # the boundary: whatever a model's files or the hub do, the reason is said and loading tried again
            self._loading.pop(source, None)
            raise Unsupported(
                f"appending needs the model's tokenizer: {error}; set `tokenizer` to a folder with it",
                param="append_messages",
                code="no_tokenizer",
            ) from error
        await self._check(engine, tokenizer)
        return tokenizer

    def _load(self, source: str) -> ChatTokenizer:
        tokenizer = ChatTokenizer.load(
            source,
            self._chat_template,
            revision=self._revision,
            trust_remote_code=self._trust_remote_code,
        )
        # a vocabulary and the libraries that read it are a million objects that live as long as the process:
        # walking them in every full collection stops the event loop for a fifth of a second
        gc.freeze()
        return tokenizer

    async def _check(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        compared = 0
        for messages in _CONVERSATIONS:
            status, body = await ask(engine, json_call("/tokenize", {"messages": messages}))
            if status != 200:
                continue
            try:
                theirs = msgspec.json.decode(body, type=_Rendered).tokens
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EngineBroken(
                    f"{engine.name} answers /tokenize with something else than tokens"
                ) from error
            try:
                ours = await asyncio.to_thread(tokenizer.render, messages)
            except TokenizationError:
                continue
            if ours != theirs:
                raise Unsupported(
                    f"the tokenizer or template in {tokenizer.source!r} renders other ids than the engine "
                    f"{engine.name}: set `tokenizer` and `chat_template` to what the engine uses",
                    param="append_messages",
                    code="tokenizer_mismatch",
                )
            compared += 1
        if not compared:
            raise Unsupported(
                f"the engine {engine.name} renders no conversation to compare the tokenizer with",
                param="append_messages",
                code="tokenizer_unchecked",
            )
