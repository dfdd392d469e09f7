"""Plans prompts with ids from the client: appends messages, places their images and their turns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import msgspec
from msgspec.structs import replace

from chat_tokenizer import (
    ChatTokenizer,
    InvalidIds,
    PrefixMismatch,
    TemplateUnsupported,
    TokenizationError,
    check_history,
    ids,
)
from chat_tokenizer.encoder import Limit
from chat_tokenizer.errors import TooManyIds
from chat_tokenizer.placeholders import PlaceholdersDiffer
from tokenproxy.base.errors import BadRequest, NotReady, RendererUnavailable, Unsupported
from tokenproxy.base.request import ChatRequest, GivenIds
from tokenproxy.record.appending import (
    Appended,
    Continuation,
    Messages,
    check_ids_fit,
    is_truncated,
    suffix,
    too_long,
)
from tokenproxy.record.claims import Claims
from tokenproxy.record.identity import Conversation, LazyMessages
from tokenproxy.record.images import ImageRef, NotLoadable, expand_images, refs_in, same_images
from tokenproxy.record.match import Match
from tokenproxy.record.plan import PromptPlan, ServedModel, place, place_nowhere
from tokenproxy.record.planner import UNREADABLE, Planner
from tokenproxy.record.turn import PromptImage, unpack_ids
from tokenproxy.record.vocabulary import Reason, Source

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode
_parse = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """Makes the prompt of one request from ids of its client."""

    planner: Planner
    request: ChatRequest
    model: ServedModel

    async def plan(self, given: GivenIds, claims: Claims) -> PromptPlan:
        """Plan a prompt of given ids, with the messages that the request appends to them.

        Raises:
            BadRequest: as `place_images` and `append`; or the prompt continues a turn with images, and the
                engine takes none together with ids.
            Unsupported, Overloaded, NotReady: as `append`.
        """
        request, model = self.request, self.model
        given, images = await self.place_images(given)
        reason: Reason | None = None
        if request.append is None:
            check_ids_fit(request, given, model)
            source, reason, prompt, appended = Source.GIVEN, Reason.IDS_GIVEN, ids.compact(given.raw), 0
        else:
            whole = await self.append(given)
            source, prompt, appended = Source.EXTENDED, whole.prompt, whole.appended
            images = (*images, *whole.images)
        if given.is_prefix:
            source, reason = Source.GIVEN, Reason.PREFIX_GIVEN
        return replace(
            await self._place(prompt, claims, images),
            source=source,
            reason=reason,
            prompt=prompt,
            reused=given.count,
            appended=appended,
            images=images,
        )

    async def append(self, given: GivenIds, *, to_complete: bool = True) -> Appended:
        """Append messages to given ids with the chat template.

        Args:
            to_complete: whether a completion follows, so that the whole prompt must fit the model's context.
                Otherwise only the appended ids must.

        Raises:
            BadRequest: the template refuses the messages, an image is invalid, or the prompt is longer than
                the model's context.
            Unsupported: there is no tokenizer, or no exact append for this template.
            Overloaded: the limit of concurrent tokenising is reached.
            NotReady: there is no history, and the template has not been examined yet.
        """
        request, model = self.request, self.model
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise model.tokenizer_error or Unsupported("appending needs the model's tokenizer")
        if to_complete:
            check_ids_fit(request, given, model)
        before = given.count if to_complete and not is_truncated(request) else 0
        most_ids = None if model.max_model_len is None else model.max_model_len - before
        try:
            field = given.after
            if reserved := tokenizer.reserved(request.rendering.parse_template_kwargs()):
                raise BadRequest(
                    f"`chat_template_kwargs` cannot set {', '.join(reserved)} together with `{field}`",
                    param="chat_template_kwargs",
                )
            prompt, size = ids.compact(given.raw), len(request.append or b"[]") + len(request.messages)
            media = "append_messages" in request.media
            parse = partial(self._messages, given)
            new = Continuation(prompt, given.count, None, field, given.first, parse, media, size)
            return await self.planner.append(request.rendering, model, new, most_ids)
        except TooManyIds as error:
            raise too_long(model, before + error.count, given.after, at_least=error.at_least) from error
        except msgspec.DecodeError as error:
            raise BadRequest(f"`tools`: {error}", param="tools") from error
        except TemplateUnsupported as error:
            raise Unsupported(
                f"cannot append exactly: {error}", param=given.after, code="template_unsupported"
            ) from error
        except PrefixMismatch as error:
            raise BadRequest(
                f"`{given.field}`: {error}", param=given.field, code="prefix_mismatch"
            ) from error
        except InvalidIds as error:
            raise BadRequest(f"`{given.field}` {error}", param=given.field) from error
        except NotLoadable as error:
            raise BadRequest(str(error), param=given.after, code="image_not_loaded") from error
        except TokenizationError as error:
            raise BadRequest(f"`{given.after}`: {error}", param=given.after) from error

    def _messages(self, given: GivenIds) -> tuple[Messages, Messages | None]:
        """The messages to append, and those before them if they end with an assistant's; for a thread.

        Raises:
            PrefixMismatch: the given ids are a prefix of other messages.
            BadRequest: they are no messages, or a prefix holds an id that is out of vocabulary.
            NotReady: there are none before them, and the template has not been examined yet.
        """
        new, history = objects(self.request.append or b"[]", given.after), _history(self.request)
        if history and history[-1].get("role") == "assistant":
            if given.is_prefix and self.model.tokenizer is not None:
                self._check_prefix(self.model.tokenizer, given, history, new)
            return new, history
        if self.model.tokenizer is not None and self.model.tokenizer.proof is None:
            raise NotReady(
                "the chat template is still being examined, which takes seconds after the start: send "
                "the conversation as `messages` too, or try again",
                param="messages",
                code="template_unproved",
            )
        return new, None

    def _check_prefix(
        self, tokenizer: ChatTokenizer, given: GivenIds, history: Messages, new: Messages
    ) -> None:
        """Check that the given ids are those of the history. Raises PrefixMismatch, BadRequest."""
        prefix, rendering = in_vocabulary(given.raw, tokenizer, given.field), self.request.rendering
        tools, template_kwargs = rendering.parse_tools(), rendering.parse_template_kwargs()
        check_history(tokenizer, prefix, history, new, tools=tools, template_kwargs=template_kwargs)

    async def _place(self, prompt: bytes, claims: Claims, images: Sequence[PromptImage] = ()) -> PromptPlan:
        """Find where to record the turn of a request with given ids.

        It is recorded in its session, else in the rollout that its messages continue, else in a new rollout
        if it has messages, else nowhere. It is findable by its text only if its ids are exactly those of the
        recorded conversation.

        Args:
            prompt: the whole prompt as a compact JSON array.
            images: those of the prompt. A turn with the same ids and other images is not continued.
        """
        request, model = self.request, self.model
        whole = bool(request.messages)
        if not request.record or not (whole or request.session):
            return place_nowhere(request, model)
        try:
            messages = request.messages or request.append or b"[]"
            conversation, scope = await self.planner.identify(request, messages, model)
        except UNREADABLE:
            return place_nowhere(request, model)  # the engine refuses them
        match, proved = Match(), False
        if whole:
            match = await self.planner.matcher.match(
                request,
                conversation,
                scope,
                claims,
                lambda turn: turn.begins(prompt) and same_images(turn.images, images[: len(turn.images)]),
            )
            proved = await self._proves(conversation, match, prompt)
        plan = place(request, model, scope, conversation, match)
        parent, first_new = match.turn, match.end + 1
        if parent is not None and parent.rollout != plan.session.id:
            parent = None
        if parent is None:
            known = images if model.images else None
            turns = await self.planner.matcher.longest_in_session(request, prompt, known)
            if model.images is None and any(turn.images for turn in turns):
                # without its images, the engine would read the placeholders as text
                raise no_images(request.given.field if request.given else "messages")
            parent = turns[0] if turns else None
            first_new = conversation.ends[0] + 1 if whole and conversation.ends else 0
            if whole and request.append is not None:  # an assistant message may be among those to append
                first_new = len(conversation.messages) - len(_split(request.append))
        return replace(
            plan,
            parent=parent,
            first_new=first_new if parent else 0,
            findable=proved,
            match=replace(match, turn=match.turn or parent),
        )

    async def _proves(self, conversation: Conversation, match: Match, prompt: bytes) -> bool:
        """Whether a prompt equals the proxy's own: recorded ids, then the template's suffix."""
        request, model = self.request, self.model
        tokenizer, rendering, turn = model.tokenizer, request.rendering, match.turn
        if tokenizer is None or conversation.media or not request.findable:
            return False
        if turn is None and (conversation.ends or conversation.ends_with_assistant):
            return False  # its earlier turns were sampled elsewhere: a rendering proves nothing about them
        stop = Event()
        # stop at more ids than the prompt has: they cannot be equal
        limit = Limit(ids.check(prompt), stop.is_set)
        first = match.end + 1

        def prove() -> bool:
            new = conversation.parse(first)
            try:
                if turn is not None:
                    history = LazyMessages(conversation.raws[:first])
                    appended = suffix(tokenizer, turn.ids, turn, new, rendering, history, limit)
                    return ids.join(turn.ids, appended) == prompt
                rendered = tokenizer.render(new, limit=limit, **rendering.parsed())
            except (TokenizationError, RendererUnavailable):
                return False
            return ids.dump(rendered) == prompt

        return await self.planner.matcher.encoders.run(
            prove, conversation.size(first), tokenises=True, stop=stop
        )

    async def place_images(self, given: GivenIds) -> tuple[GivenIds, tuple[PromptImage, ...]]:
        """The given ids with every image expanded, and where the images are in them.

        Images come from the request's `images`, else from its `messages`, else from the recorded turn of the
        session whose ids the prompt begins with. Each placeholder is expanded exactly once, however it came.

        Raises:
            BadRequest: the images are not those of the placeholders, one is invalid, or the engine takes no
                images together with ids.
        """
        request, model = self.request, self.model
        images, placeholder = model.images, model.placeholder
        if images is None and (request.images or request.media):
            raise no_images(request.media[0] if request.media else request.images_field)
        holds_placeholder = (
            placeholder is not None and re.search(rb"[\[,\s]%d[\],\s]" % placeholder, given.raw) is not None
        )
        if not request.images and not holds_placeholder:
            return given, ()
        if images is None:
            # without its images, the engine would read the placeholders as text
            raise no_images(given.field)
        field = request.images_field if request.images is not None else "messages"
        if request.images is None and "messages" not in request.media:
            return given, await self._recorded_images(given, images.placeholder)
        try:
            if request.images is not None:
                refs = [ImageRef(f"{field}[{index}]", url) for index, url in enumerate(request.images)]
            else:
                refs = refs_in(_history(request), field)
            loaded = await self.planner.images.load(refs, images, field)
            expanded, prompt_images = expand_images(_unpack(given), images, loaded, 0)
        except NotLoadable as error:
            raise BadRequest(str(error), param=field, code="image_not_loaded") from error
        except PlaceholdersDiffer as error:
            raise BadRequest(f"`{given.field}` and `{field}`: {error}", param=field) from error
        return replace(given, raw=ids.dump(expanded), count=len(expanded)), tuple(prompt_images)

    async def _recorded_images(self, given: GivenIds, placeholder: int) -> tuple[PromptImage, ...]:
        """The images of the recorded turn that given ids begin with. Raises BadRequest."""
        request = self.request
        turns = await self.planner.matcher.longest_in_session(request, ids.compact(given.raw))
        recorded, problem = turns[0].images if turns else (), ""
        if not all(same_images(turn.images, recorded) for turn in turns):
            problem = (
                f"recorded turns with the ids of `{given.field}` hold different images: send those of the "
                "prompt"
            )
        outside = _unpack(given)
        for image in reversed(recorded):
            del outside[image.offset : image.offset + image.length]
        if not problem and placeholder in outside:
            problem = (
                f"`{given.field}` holds the placeholder of images, {placeholder}, and its images are not "
                "recorded: send them"
            )
        if problem:
            raise BadRequest(
                f"{problem} in `{request.images_field}`, or send the conversation as `messages`",
                param=request.images_field,
                code="images_missing",
            )
        return recorded


def _history(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages before those to append, which are the end of the request's messages. Raises BadRequest."""
    messages = objects(request.messages, "messages") if request.messages else []
    return messages[: len(messages) - len(_split(request.append or b"[]"))]


def _unpack(given: GivenIds) -> list[int]:
    """The given ids as integers. Raises BadRequest if one has more than 32 bits."""
    try:
        return unpack_ids(ids.pack(given.raw))
    except InvalidIds as error:
        raise BadRequest(f"`{given.field}` {error}", param=given.field) from error


def no_images(field: str) -> BadRequest:
    """The error for images next to ids on an engine that does not take them so."""
    return BadRequest(
        f"`{field}` holds images, and this engine takes no images together with prompt ids: serve a model of "
        "images whose chat template takes parts, start vLLM with --enable-scale-out, and send no `stop` "
        "strings",
        param=field,
        code="no_images",
    )


def in_vocabulary(raw: bytes, tokenizer: ChatTokenizer, field: str) -> list[int]:
    """Checked ids as integers; BadRequest, naming `field`, if one of them does not exist."""
    try:
        values = msgspec.json.decode(raw, type=list[int])
    except msgspec.DecodeError as error:
        raise BadRequest(f"`{field}` holds an id that is out of vocabulary", param=field) from error
    if (largest := max(values)) >= tokenizer.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param=field)
    return values


def objects(raw: bytes, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects. Raises BadRequest, naming `field`."""
    try:
        # one by one, because parsing holds the GIL
        return [_parse(each) for each in _split(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"`{field}`: {error}", param=field) from error
