"""Load the tokenizer of each served model once, and compare it with every engine that serves the model.

The proxy needs the tokenizer to append messages to ids. A tokenizer that differs from the engine's (another
template, other defaults) would produce prompts that the engine never renders. So every engine renders a few
conversations; if there is no template, or on any difference, the engine itself is the renderer. An engine
does not report which content format it runs with (`--chat-template-content-format`): it is the one with which
all renderings agree.
"""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from chat_tokenizer import ChatTokenizer, TokenizationError, TokenizerUnavailable
from chat_tokenizer.cache import digest
from chat_tokenizer.files import is_here
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import RenderOptions
from chat_tokenizer.template import ContentFormat
from tokenproxy.base.errors import ApiError, RendererUnavailable, Unsupported
from tokenproxy.engine.discovery import Model
from tokenproxy.engine.protocol import Engine
from tokenproxy.engine.rendering import (
    CONSUMED,
    CONVERSATIONS,
    TOKENIZE,
    RenderInput,
    RenderRoute,
    consumed,
    find_route,
    rendered,
    without_dates,
)

log = logging.getLogger("tokenproxy")

_CONTENT_FORMATS: tuple[ContentFormat, ...] = ("string", "openai")
RENDER_TIMEOUT_S = 30.0
_SHOWN = 40
"""Characters and ids of a text that an error shows."""


class Tokenizers:
    """Loads each tokenizer once, for all engines that serve its model."""

    def __init__(
        self,
        source: str | None = None,
        chat_template: str | None = None,
        *,
        content_format: ContentFormat | None = None,
        proof_folder: Path | None = None,
        **options: Any,
    ) -> None:
        """Arguments are those of `ChatTokenizer.load`; None leaves it to the model and its engine.

        `proof_folder` is the folder for proofs about chat templates; None keeps them in memory.
        """
        self._source = source
        options |= {"chat_template": chat_template, "content_format": content_format}
        load: Callable[..., ChatTokenizer] = ChatTokenizer.load
        self._load_one = partial(load, needs_template=False, **options)
        self._content_format = content_format
        self._other_formats = _CONTENT_FORMATS if content_format is None else ()
        self._proof_folder = proof_folder
        self._loader = ThreadPoolExecutor(thread_name_prefix="load")
        """Not the event loop's own, whose end would wait for a hub that does not answer."""
        self._loading: dict[str, asyncio.Future[list[ChatTokenizer]]] = {}
        self._examined: dict[int, ChatTokenizer] = {}
        self._by_engines: dict[bytes, tuple[ChatTokenizer, EngineRenderings]] = {}

    def are_here(self, model: Model | None) -> bool:
        """Whether the tokenizer of a model is loaded without a download, for which no prompt should wait."""
        source = self._source or (model.root if model else None)
        return source is None or is_here(source)

    async def find(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        """The tokenizer of the model that an engine serves, compared with that engine.

        Raises:
            Unsupported: the tokenizer cannot be loaded, or renders other ids than the engine.
            ApiError: the engine does not respond.
        """
        source = self._source or (model.root if model else None)
        if source is None:
            raise _unsupported(
                "appending needs the model's tokenizer, and the engine does not report which model it "
                "loaded: set `tokenizer` to the model's folder or hub name",
                "no_tokenizer",
            )
        if source not in self._loading:
            loop = asyncio.get_running_loop()
            self._loading[source] = loop.run_in_executor(self._loader, self._load, source)
        try:
            candidates = await asyncio.shield(self._loading[source])
        except Exception as error:
            # the boundary of loading: a model's files or the hub may raise anything. The request gets the
            # reason, and the next one loads again
            self._loading.pop(source, None)
            problem = f"appending needs the model's tokenizer: {error}; set `tokenizer` to a folder with it"
            raise _unsupported(problem, "no_tokenizer") from error
        self.forget(engine)  # it may have been restarted, and render otherwise
        tokenizer = await self._find_alike(candidates, engine)
        # on a thread, because an engine may be the one that renders; requests read them on the event loop
        await asyncio.to_thread(lambda: (tokenizer.merges_system, tokenizer.effort_without_thinking))
        if id(tokenizer) not in self._examined:
            self._examined[id(tokenizer)] = tokenizer
            # a daemon, because the end of the process must not wait for a proof
            threading.Thread(target=self._prove, args=(tokenizer,), name="prove", daemon=True).start()
        return tokenizer

    def forget(self, engine: Engine) -> None:
        """Ask an engine for no renderings until it is examined again. Its credential may have changed."""
        for _, renderings in self._by_engines.values():
            renderings.engines[:] = [each for each in renderings.engines if each.name != engine.name]

    async def _find_alike(self, candidates: list[ChatTokenizer], engine: Engine) -> ChatTokenizer:
        """The first tokenizer that renders the same ids as the engine, or one that asks the engine.

        Raises:
            Unsupported: there is none, or no rendering to compare.
            ApiError: the engine does not respond.
        """
        prompts, compared = await consumed(engine), False
        with_template = [each for each in candidates if each.has_template]
        if with_template:
            try:
                ids = await rendered(engine, TOKENIZE, CONVERSATIONS)
            except Unsupported:
                ids = []
            shown = [*_shown(CONVERSATIONS, ids), *_shown(CONSUMED, prompts)]
            compared = bool(shown)
            for candidate in with_template if shown else ():
                if await asyncio.to_thread(_agrees, candidate, shown):
                    return candidate
        route = await find_route(engine, prompts)
        if route is None and compared:
            raise _mismatch(with_template[0], engine, shown)
        if route is None:
            raise _unsupported(
                f"the engine {engine.name} renders no conversation to compare the tokenizer with: "
                "its /tokenize route and chat template must accept a conversation",
                "tokenizer_unchecked",
            )
        return await self._rendered_by(candidates, engine, route)

    async def _rendered_by(
        self, candidates: list[ChatTokenizer], engine: Engine, route: RenderRoute
    ) -> ChatTokenizer:
        """The tokenizer whose conversations are rendered by this engine, and by others that render alike.

        Of the candidates, the first that gives the ids of most renderings. A wrong one may give those of a
        short text, and the right one not all: some engines encode the parts of a message apart. So each later
        rendering is compared by itself.

        Raises:
            Unsupported: no candidate gives the ids of a rendering.
            ApiError: the engine does not respond.
        """
        shown = _shown(CONVERSATIONS, await rendered(engine, route, CONVERSATIONS))
        counts = [await asyncio.to_thread(_count_alike, each, shown) for each in candidates]
        tokenizer = candidates[counts.index(max(counts))]
        if not any(counts):
            raise _mismatch(tokenizer, engine, shown)
        texts = [without_dates(tokenizer.decode(each)) for _, each in shown]
        identity = digest(tokenizer.fingerprint, texts)
        if identity not in self._by_engines:
            renderings = EngineRenderings(route)
            asking = tokenizer.rendered_by_engine(renderings, identity)
            renderings.engines.append(engine)
            self._by_engines[identity] = (asking, renderings)
            log.info("%s renders the conversations itself, by %s", engine.name, route.path)
        asking, renderings = self._by_engines[identity]
        if engine not in renderings.engines:
            renderings.engines.append(engine)
        return asking

    def _load(self, source: str) -> list[ChatTokenizer]:
        """The tokenizers of a model, one for each way to load it and each content format, best first.

        First comes Mistral's own vocabulary, with which vLLM's `--tokenizer-mode mistral` renders. Last comes
        `tokenizer.json` as it is, which its modes for DeepSeek load, if transformers' class for the model
        builds another tokenizer than that: releases of transformers differ in this, too.
        """
        candidates = [self._load_one(source)]
        if candidates[0].has_template:
            with suppress(TokenizerUnavailable):
                candidates.insert(0, self._load_one(source, chat_template=None, file="tekken.json"))
        with suppress(TokenizerUnavailable):
            plain = self._load_one(source, file="tokenizer.json")
            if all(plain.fingerprint != each.fingerprint for each in candidates):
                candidates.append(plain)
        candidates = [
            candidate.with_content_format(content_format)
            for candidate in candidates
            for content_format in (self._content_format, *self._other_formats)
        ]
        # a vocabulary and the libraries that read it are a million objects that live as long as the process:
        # a full garbage collection that visits them blocks the event loop for 0.2 s
        gc.freeze()
        return candidates

    def _prove(self, tokenizer: ChatTokenizer) -> None:
        try:
            proof = tokenizer.prove(self._proof_folder)
        except RendererUnavailable as error:
            # without a proof whole histories are rendered; the next engine that is found starts another
            self._examined.pop(id(tokenizer), None)
            log.warning("how %s renders is not examined: %s", tokenizer.source, error)
            return
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


def _unsupported(problem: str, code: str) -> Unsupported:
    return Unsupported(problem, param="append_messages", code=code)


def _mismatch(
    tokenizer: ChatTokenizer, engine: Engine, shown: Sequence[tuple[RenderInput, list[int]]]
) -> Unsupported:
    """The error for a tokenizer that gives other ids, with the first text that shows it and both its ids."""
    texts = [tokenizer.decode(ids) for _, ids in shown]
    different = (
        f": for {text[:_SHOWN]!r} it gives {own[:_SHOWN]}, the engine {ids[:_SHOWN]}"
        for text, (_, ids) in zip(texts, shown, strict=True)
        if (own := tokenizer.encode(text)) != ids
    )
    return _unsupported(
        f"no way to load the tokenizer in {tokenizer.source!r} gives the ids of the engine {engine.name}"
        f"{next(different, '')}. Set `tokenizer` to a folder whose tokenizer.json gives these ids, and "
        "`chat_template` to the engine's; releases of transformers may load a folder in different ways",
        "tokenizer_mismatch",
    )


def _shown(
    conversations: Sequence[RenderInput], ids: Sequence[list[int] | None]
) -> list[tuple[RenderInput, list[int]]]:
    """The conversations that an engine renders, with their ids."""
    return [(each, found) for each, found in zip(conversations, ids, strict=False) if found is not None]


def _agrees(tokenizer: ChatTokenizer, renderings: Sequence[tuple[RenderInput, list[int]]]) -> bool:
    """Whether a tokenizer renders every conversation as the engine does."""
    try:
        return all(
            tokenizer.render(messages, tools=options.tools) == engine_ids
            for (messages, options), engine_ids in renderings
        )
    except TokenizationError:  # a template that refuses what the engine renders is another one
        return False


def _count_alike(tokenizer: ChatTokenizer, renderings: Sequence[tuple[RenderInput, list[int]]]) -> int:
    """The number of an engine's renderings whose text has the engine's ids, and holds what was said.

    A tokenizer that spells bytes in another way may give the ids of its own wrong text.
    """
    texts = [tokenizer.decode(ids) for _, ids in renderings]
    said = [
        max((m["content"] for m in messages if isinstance(m["content"], str)), key=len, default="")
        for (messages, _), _ in renderings
    ]
    return sum(
        word.strip() in text and tokenizer.encode(text) == ids
        for word, text, (_, ids) in zip(said, texts, renderings, strict=True)
    )


class EngineRenderings:
    """Renders conversations on any of the engines that render alike. Called on threads only."""

    def __init__(self, route: RenderRoute) -> None:
        self.engines: list[Engine] = []
        self._route = route
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __call__(self, messages: Sequence[Message], options: RenderOptions) -> list[int]:
        """The ids of a conversation; see `chat_tokenizer.engine_renderer.Render`.

        Raises:
            InvalidMessages: the engine refuses the messages.
            RendererUnavailable: none of the engines responds in time.
        """
        if threading.get_ident() == self._thread:
            raise RuntimeError("a rendering is waited for on the event loop, which would make it")
        if not self._loop.is_running():
            raise RendererUnavailable("the proxy stops")
        work = self._render((messages, options))
        rendering = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return rendering.result(RENDER_TIMEOUT_S)
        except (TimeoutError, CancelledError) as error:
            rendering.cancel()
            if not self._loop.is_running():
                work.close()  # nobody else does
            raise RendererUnavailable(
                f"no engine rendered the messages within {RENDER_TIMEOUT_S:.0f} s"
            ) from error

    async def _render(self, conversation: RenderInput) -> list[int]:
        self.engines[:] = [*self.engines[1:], *self.engines[:1]]  # they take turns
        problem = "none of them responds"
        for engine in list(self.engines):
            try:
                return await self._route.ids(engine, conversation)
            except ApiError as error:
                problem = error.message
        raise RendererUnavailable(f"no engine renders the messages: {problem}")
