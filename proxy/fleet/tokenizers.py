"""Load the tokenizer of each served model once, and compare it with every engine that serves the model.

The proxy needs the tokenizer to append messages to ids. A tokenizer that differs from the engine's (another
template, other defaults) would produce prompts that the engine never renders. So every engine renders a few
conversations, and on any difference appending is refused with the reason.
"""

import asyncio
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec

from proxy.engine.discovery import Model, fetch
from proxy.engine.protocol import Engine
from proxy.engine.token_in import json_request
from proxy.errors import EngineBroken, Unsupported
from tokenization import ChatTokenizer, TokenizationError

log = logging.getLogger("tokenproxy")

_TOOL_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
_CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "What is 2 + 2?\n"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": " Grüße,  in words: 四?"},
    ],
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "4"},
    ],
]
"""Rendered by the proxy and by the engine. A conversation that a template refuses is skipped."""


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
        proof_folder: Path | None = None,
    ) -> None:
        """`proof_folder` is where proofs about chat templates are kept; None keeps them in memory."""
        self._source = source
        self._chat_template = chat_template
        self._trust_remote_code = trust_remote_code
        self._revision = revision
        self._proof_folder = proof_folder
        self._loading: dict[str, asyncio.Task[ChatTokenizer]] = {}

    async def for_engine(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        """The tokenizer of the model that an engine serves, compared with that engine.

        Raises:
            Unsupported: the tokenizer cannot be loaded, or renders other ids than the engine.
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
            tokenizer = await asyncio.shield(self._loading[source])
        except Exception as error:
            # the boundary: a model's files or the hub may raise anything; report it, and load again next time
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
        # a full garbage collection that visits them blocks the event loop for 0.2 s
        gc.freeze()
        # a daemon, because nobody waits for a proof, not even the end of the process
        threading.Thread(target=self._prove, args=(tokenizer,), name="prove", daemon=True).start()
        return tokenizer

    def _prove(self, tokenizer: ChatTokenizer) -> None:
        try:
            proof = tokenizer.prove(self._proof_folder)
        except Exception:  # the boundary of the thread: without a proof whole histories are rendered
            log.exception("the chat template of %s could not be examined", tokenizer.source)
            return
        log.info(
            "chat template of %s: what follows a turn depends on the %s, after tool results on the %s%s",
            tokenizer.source,
            proof.after_messages,
            proof.after_results,
            f" ({proof.reason})" if proof.reason else "",
        )

    async def _check(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        """Raise Unsupported if a rendering differs from the engine's, or if the engine renders nothing."""
        compared = 0
        for messages in _CONVERSATIONS:
            status, body = await fetch(engine, json_request("/tokenize", {"messages": messages}))
            if status != 200:
                continue
            try:
                engine_ids = msgspec.json.decode(body, type=_Rendered).tokens
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EngineBroken(f"{engine.name} returned no list of `tokens` for /tokenize") from error
            try:
                own_ids = await asyncio.to_thread(tokenizer.render, messages)
            except TokenizationError:
                continue
            if own_ids != engine_ids:
                raise Unsupported(
                    f"the tokenizer or template in {tokenizer.source!r} renders other ids than the engine "
                    f"{engine.name}: set `tokenizer` and `chat_template` to what the engine uses",
                    param="append_messages",
                    code="tokenizer_mismatch",
                )
            compared += 1
        if not compared:
            raise Unsupported(
                f"the engine {engine.name} renders no conversation to compare the tokenizer with: "
                "its /tokenize route and chat template must accept a conversation",
                param="append_messages",
                code="tokenizer_unchecked",
            )
