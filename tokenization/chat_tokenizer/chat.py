"""The tokenizer of a chat model: renders a conversation, or appends messages to one that is already ids.

Law, for every call of `ChatTokenizer.append` that returns:

    appended.prompt_ids[: len(prompt_ids)] == prompt_ids

Sampled ids are never decoded. Only the text that the template prints after the last assistant turn is
encoded, and it is sliced out of the template's own rendering.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from chat_tokenizer.added_tokens import AddedTokens
from chat_tokenizer.append import Appended, AppendedIds, Ending, checked_last_id, encode_after_cut
from chat_tokenizer.cache import BoundedCache, CacheInfo, digest
from chat_tokenizer.discovery import Discovery
from chat_tokenizer.encoder import NO_LIMIT, Encoder, Limit
from chat_tokenizer.engine_renderer import EngineRenderer, Render
from chat_tokenizer.equivalences import Unprinted
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported, TokenizerUnavailable, UnfinishedTurn
from chat_tokenizer.files import VocabularyFile, load_files
from chat_tokenizer.messages import Message, Tools, check_appended
from chat_tokenizer.proof import Proof, load_proof, proof_key, store_proof
from chat_tokenizer.renderer import Renderer, RenderOptions
from chat_tokenizer.tails import Tails
from chat_tokenizer.template import ContentFormat, Template
from chat_tokenizer.turns import turn_context
from chat_tokenizer.unprinted import unprinted

Unfinished = Literal["close", "continue", "reject"]
LAST_IDS = 8
"""Number of last ids in which a stop token is looked for: a template prints little after it."""
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Efforts of reasoning with thinking."""


@dataclass
class ChatTokenizer:
    """A fast tokenizer with its chat template. Safe to use from several threads."""

    source: str
    """The folder or hub name that it was loaded from."""
    vocab_size: int
    """Size of the tokenizer or of the model's embedding, whichever is larger: every id is below it."""
    _tokenizer: Any
    _encoder: Encoder
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a turn of this model: the tokenizer's EOS, and `eos_token_id` of the generation config."""
    content_format: ContentFormat | None = None
    """The form of content for the template; None to detect it as vLLM does."""
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template for all renderings, where a request does not set them."""
    renderer: Renderer | None = None
    """Renders the conversations; None for the tokenizer's own template."""

    def __post_init__(self) -> None:
        self._template: Renderer = self.renderer or Template(
            self._tokenizer, self.content_format, self.default_template_kwargs
        )
        tokens = self._tokenizer.added_tokens_decoder.items()
        self._added_ids = {token.content: number for number, token in tokens}
        special_ids = {number for number, token in tokens if token.special}
        self._added = AddedTokens(self._added_ids, special_ids, self.stop_ids)
        self._discovery = Discovery(self._template, Tails(self._template, self._added))
        self._suffixes: BoundedCache[bytes, AppendedIds] = BoundedCache(
            1024, lambda appended: len(appended[1]) <= 2_048
        )

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, a digest of vocabulary, merges, chat template and its settings."""
        fingerprint = hashlib.blake2b(self._encoder.description.encode(), digest_size=16)
        fingerprint.update(b"\0" + self._template.identity)
        return fingerprint.hexdigest()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template of its own, or another renderer."""
        return self.renderer is not None or bool(self._tokenizer.chat_template)

    @property
    def engine_renders(self) -> bool:
        """Whether an engine renders the conversations, so that rendering may wait for it."""
        return self.renderer is not None

    @cached_property
    def merges_system(self) -> bool:
        """Whether vLLM's route for Anthropic's messages merges all system messages into the first."""
        return not self._template.takes_later_system()

    @cached_property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` with which vLLM's route for Anthropic's messages disables thinking.

        It is `none`, unless the template refuses that or renders an effort in the same way.
        """
        without = self._text_of_effort("none")
        efforts = map(self._text_of_effort, _EFFORTS)
        return "low" if without is None or without in efforts else "none"

    @cached_property
    def unprinted(self) -> Unprinted:
        """What of messages changes no rendering. The first call may take a second."""
        return unprinted(self._template)

    def _text_of_effort(self, effort: str) -> str | None:
        kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        try:
            return self.text([{"role": "user", "content": "Hi"}], template_kwargs=kwargs)
        except InvalidMessages:
            return None

    @property
    def proof(self) -> Proof | None:
        """The proof about the template; None before `prove` returned."""
        return self._discovery.proof

    def is_local(
        self,
        new_messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        history: Sequence[Message] | None = None,
    ) -> bool:
        """Whether it is proved that the text after a turn depends on no earlier message.

        With a history: whether an append to it relies on that, because rendering all of it is dear.
        """
        options = RenderOptions(None, True, template_kwargs or {})
        if history is not None:
            return self._discovery.stands_alone(new_messages, history, options)
        return self._discovery.is_local(new_messages, options)

    def prove(self, folder: Path | None = None) -> Proof:
        """Examine which part of a history determines the text that the template appends.

        The first call renders some thousand short conversations, which takes up to 30 s of CPU time, mostly
        less than 1 s. Before that, `append` renders the whole history; without a history, `append` calls this
        first.

        Args:
            folder: keeps proofs for other processes; created if it does not exist.
        """
        stored = load_proof(folder, self._proof_key) if folder is not None and self.proof is None else None
        if stored is not None:
            return self._discovery.adopt(stored)
        new = self.proof is None
        proof = self._discovery.prove()
        if new and folder is not None and proof.complete:
            store_proof(folder, self._proof_key, proof)
        return proof

    def audit(
        self,
        new_messages: Sequence[Message],
        history: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> list[Message] | None:
        """Compare what `append` adds to this history with a rendering of all of it.

        Returns:
            None if they agree, or if the whole history is rendered anyway. Otherwise the shortest history
            that was found to differ; `append` then renders the whole history for such messages, and so do
            processes that read `folder` when they start.
        """
        options = RenderOptions(tools, add_generation_prompt, template_kwargs or {})
        refutation = self._discovery.refutation(new_messages, history, options)
        if refutation is not None and folder is not None and self.proof is not None:
            store_proof(folder, self._proof_key, self.proof)
        return refutation

    @cached_property
    def _proof_key(self) -> str:
        return proof_key(self._template.identity, self._added_ids, self.stop_ids)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        chat_template: str | None = None,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        content_format: ContentFormat | None = None,
        default_template_kwargs: Mapping[str, Any] | None = None,
        needs_template: bool = True,
        file: VocabularyFile | None = None,
    ) -> "ChatTokenizer":
        """Load tokenizer and template from a folder or from the Hugging Face hub.

        Args:
            folder: a model folder, or the name of a model on the hub or in its local cache.
            chat_template: Jinja source that replaces the model's own template.
            revision: branch, tag or commit on the hub.
            trust_remote_code: run Python code that the model's repository brings.
            content_format: pass content to the template as text ("string") or as a list of parts ("openai");
                None detects it as vLLM does. An engine's is its `--chat-template-content-format`.
            default_template_kwargs: variables of the template that apply where a request does not set them.
                An engine's are its `--default-chat-template-kwargs`.
            needs_template: whether a tokenizer without a chat template is refused; if not, use it with
                `rendered_by_engine` only.
            file: load this file. None leaves it to transformers, whose classes may build another tokenizer
                than the one in `tokenizer.json`. Mistral's `tekken.json` has no template.

        Raises:
            TokenizerUnavailable: the tokenizer cannot be loaded, is not a fast one, or has no chat template.
        """
        tokenizer, vocab_size, stop_ids = load_files(
            str(folder), chat_template, revision, trust_remote_code, file
        )
        if needs_template and not tokenizer.chat_template:
            raise TokenizerUnavailable(
                f"the tokenizer in {str(folder)!r} has no chat template: pass one, or use a chat model"
            )
        encoder = Encoder(tokenizer.backend_tokenizer.to_str())
        return cls(
            str(folder),
            vocab_size,
            tokenizer,
            encoder,
            stop_ids,
            content_format,
            default_template_kwargs or {},
        )

    def rendered_by_engine(self, render: Render, identity: bytes) -> "ChatTokenizer":
        """A tokenizer that shares the vocabulary of this one, and asks an engine for its renderings.

        Args:
            identity: equal for engines that render alike.
        """
        return replace(self, renderer=EngineRenderer(self._encoder, self._added, render, identity))

    def with_content_format(self, content_format: ContentFormat | None) -> "ChatTokenizer":
        """A tokenizer that shares the vocabulary of this one, and passes content to the template as given."""
        return replace(self, content_format=content_format)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        limit: Limit = NO_LIMIT,
    ) -> list[int]:
        """The ids of a whole conversation, equal to those the engine would make of it.

        Raises:
            InvalidMessages: the template refuses the messages.
            TooManyIds, Stopped: as `Encoder.encode`.
        """
        options = RenderOptions(tools, add_generation_prompt, template_kwargs or {})
        return self._encoder.encode(self._template.text(messages, options), limit)

    def append(
        self,
        prompt_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] | None = None,
        tools: Tools | None = None,
        finish_reason: str | None = "stop",
        stop_reason: str | int | None = None,
        unfinished: Unfinished = "close",
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        limit: Limit = NO_LIMIT,
    ) -> Appended:
        """Build the next prompt: `prompt_ids` unchanged, then the ids that the template adds after them.

        Example, with ChatML and the user message "Hi" after a turn that was cut off by its token limit:
        `close_ids` are those of `<|im_end|>`, `suffix_ids` those of
        `\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n`.

        Args:
            prompt_ids: the prompt and the completion so far; the last id is the last sampled one. Not copied
                before `Appended.prompt_ids` is read: until then only add ids to it. What is appended depends
                on the last `LAST_IDS` alone, so a caller that keeps the others itself may pass only these.
            new_messages: the messages after the sampled turn: tool results, user messages.
            history: the messages up to and including the sampled turn; needed by templates that print
                details of earlier messages next to new ones, and for a new system message after a developer
                message.
            tools: tools declared to the template.
            finish_reason: how the turn ended, as the engine reports it.
            stop_reason: the stop string or stop token that ended the turn, as vLLM reports it.
            unfinished: how to treat a turn cut off by its token limit, a stop string or an abort: "close" it
                with ids that were never sampled (mask them in the loss), "continue" it (without new
                messages), or "reject" it.
            add_generation_prompt: end the prompt with the header of the next assistant turn.
            template_kwargs: variables of the template; every name is allowed but those that `reserved`
                returns.
            limit: for the ids to append.

        Raises:
            InvalidIds: `prompt_ids` is empty.
            InvalidMessages: the template refuses the new messages.
            TemplateUnsupported: the template does not determine the ids to append.
            UnfinishedTurn: the turn was cut off, and `unfinished` is "reject".
            TooManyIds, Stopped: as `Encoder.encode`.
        """
        last_id = checked_last_id(prompt_ids)
        cut_off = finish_reason in ("length", "abort") or isinstance(stop_reason, str)
        if cut_off and unfinished == "reject":
            raise UnfinishedTurn(
                f"the turn was cut off ({stop_reason or finish_reason}): drop it, or close or continue it"
            )
        if cut_off and unfinished == "continue":
            if new_messages:
                raise InvalidMessages(
                    "a turn that is continued takes no new messages: pass none, or close the turn"
                )
            return Appended(prompt_ids, [], [])
        check_appended(new_messages, history, tools, template_kwargs)
        options = RenderOptions(tools, add_generation_prompt, template_kwargs or {}, limit.stopped)
        self._template.refuse_merged(new_messages, history, options)
        stopped = not cut_off and (last_id in self.stop_ids or last_id == stop_reason)
        last_ids = list(prompt_ids[-LAST_IDS:])
        # a turn that was cut off before its first id ends with the close of another message
        stops = [index for index, each in enumerate(last_ids) if each in self.stop_ids and not cut_off]
        ending = Ending(last_id, stopped, cut_off, tuple(last_ids[stops[-1] + 1 :]) if stops else ())
        close_ids, suffix_ids, notes = self._ids_after(ending, new_messages, history, options, limit)
        limit.check(len(close_ids) + len(suffix_ids))
        return Appended(prompt_ids, list(close_ids), list(suffix_ids), notes)

    def _ids_after(
        self,
        ending: Ending,
        new: Sequence[Message],
        history: Sequence[Message] | None,
        options: RenderOptions,
        limit: Limit,
    ) -> AppendedIds:
        """The ids that new messages add after a turn that ended so."""

        def find(*, alone: bool) -> AppendedIds:
            turn_tail = self._discovery.turn_tail(new, history, options, alone=alone)
            return encode_after_cut(self._encoder, self._added, turn_tail, ending, limit)

        if not self._discovery.stands_alone(new, history, options):
            return find(alone=False)  # not cached: a whole history is seldom rendered twice
        turn = turn_context(history[-1]) if history is not None else None
        key = digest(
            *(list(new), turn, options.key(), self._template.now()),
            *(ending.last_id, ending.stopped, ending.cut_off, ending.after_stop),
        )
        try:
            return self._suffixes.get_or_make(key, lambda: find(alone=True))
        except (InvalidMessages, TemplateUnsupported):
            if history is None:
                raise
            # a template may refuse the turn alone and accept the whole conversation
            return find(alone=False)

    def reserved(self, template_kwargs: Mapping[str, Any]) -> list[str]:
        """The names in `template_kwargs` that are arguments of the renderer, not variables of the template.

        Examples are `truncation` and `chat_template`. An engine may let them change more than the template's
        variables, so do not append to a conversation that sets one.
        """
        return sorted(self._template.own_arguments & template_kwargs.keys())

    def assistant_header(self) -> str:
        """The text between a closed message and an assistant's content; may be empty.

        Example: `<|im_start|>assistant\\n`.
        """
        return self._discovery.tails.closes.assistant_header()

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The template's rendering of a conversation. Raises InvalidMessages."""
        return self._template.text(
            messages, RenderOptions(tools, add_generation_prompt, template_kwargs or {})
        )

    def stop_id(self, *, tools: Tools | None = None, template_kwargs: Mapping[str, Any] | None = None) -> int:
        """The id of the token with which the template closes an assistant turn.

        Raises:
            TemplateUnsupported: the text that closes a turn holds no added token.
        """
        stop = self._discovery.tails.closes.of_content(RenderOptions(tools, True, template_kwargs or {})).stop
        if stop is None:
            raise TemplateUnsupported("the template closes an assistant turn with no token of its own")
        return stop

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS or other tokens around it. Releases the GIL.

        Raises:
            InvalidMessages: the text holds half of a surrogate pair.
        """
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens. Only read or compare it: encoding it may give other ids."""
        return self._encoder.decode(ids)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The token of each id as the vocabulary spells it; empty for ids without one."""
        return self._encoder.token_strings(ids)

    def token_bytes(self, ids: Iterable[int]) -> dict[int, bytes]:
        """What each of the ids stands for; those without a token are missing. See `TokenBytes`."""
        return self._encoder.token_bytes(ids)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, and those that end a turn."""
        return self._added.special_ids

    def cache_info(self) -> CacheInfo:
        """Hits, misses and size of the suffix cache."""
        return self._suffixes.info()
