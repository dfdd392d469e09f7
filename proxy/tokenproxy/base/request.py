"""One request for a chat turn, parsed once from any wire format. Data only."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from chat_tokenizer.messages import TEXT_PARTS
from tokenproxy.base.types import Headers

_TEXT_PARTS = TEXT_PARTS | {"tool_reference"}
_MEDIA_KEYS = frozenset(
    {
        *("audio_embeds", "audio_url", "input_audio", "prompt_embeds", "video_embeds", "video_url"),
        *("image_embeds", "image_pil", "image_url", "input_image"),
    }
)
"""Keys that make vLLM treat a content part of any `type` as media."""


class Visible(msgspec.Struct, frozen=True):
    """The requested parts. The proxy itself always requests ids, log-probabilities and usage."""

    ids: bool
    logprobs: bool
    usage: bool = False
    """For a stream: whether its end reports the number of tokens."""
    running_usage: bool = False
    """For a stream: whether each chunk reports the number of tokens so far."""
    reasoning: bool = True
    """If false, `ids` and `logprobs` must be false too: they would reveal the reasoning."""

    on_messages: bool = False
    """Whether each message of a whole completion holds its ids and log-probabilities (NeMo-RL's contract)."""
    hidden: tuple[str, ...] = ()
    """Names of the facts of `EVIDENCE` that the client did not ask for, and does not see."""

    @property
    def everything(self) -> bool:
        """Whether the client gets whole completions as the engine sent them."""
        return self.ids and self.logprobs and self.reasoning

    @property
    def every_chunk(self) -> bool:
        """Whether the client gets the chunks of a stream as the engine sent them."""
        return self.everything and self.usage and self.running_usage


EVERYTHING = Visible(ids=True, logprobs=True, usage=True, running_usage=True)
"""For a response that is passed on as it is."""


class ResumePolicy(StrEnum):
    """Which turns go on from the ids sampled so far after their engine broke off."""

    FAILURES = "failures"
    """Those whose engine died or whose connection broke."""
    ALL = "all"
    """Those that an engine aborted too, because its weights changed."""
    OFF = "off"
    """None."""


class ThinkingPolicy(StrEnum):
    """What happens to the reasoning of earlier turns: values of the setting `thinking_policy`."""

    KEEP = "keep"
    """It stays in the prompt: all ids are only appended to."""
    TEMPLATE = "template"
    """Where the chat template leaves some of it out, the engine renders the prompt anew."""


class EchoPolicy(StrEnum):
    """How a client must send back what was sampled: values of the setting `echo_policy`."""

    LENIENT = "lenient"
    """Forms that clients are known to send are recognised, if only one recorded turn can be meant."""
    EXACT = "exact"
    """Only what needs no reason is no edit."""


PROCESSED_LOGPROBS = "processed_logprobs"
"""vLLM's `--logprobs-mode` whose log-probabilities are those of the distribution that was sampled from."""


class EngineRoute(StrEnum):
    """The engine's route that serves a request; its fields and its response have the format of this route."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/inference/v1/generate"


class Rendering(msgspec.Struct, frozen=True):
    """The inputs of a rendering besides the messages."""

    tools: bytes = b""
    """The request's tools as JSON; empty if none."""
    template_kwargs: bytes = b""
    """JSON object with the template's arguments; empty if none."""
    options: Mapping[str, bytes] = {}
    """Other fields that an engine's rendering may print, as JSON: `tool_choice`, `response_format`, ..."""
    add_generation_prompt: bool = True

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return len(self.tools) + len(self.template_kwargs) + sum(map(len, self.options.values()))

    def parse_tools(self) -> list[dict[str, Any]] | None:
        """The tools; None if there are none."""
        return msgspec.json.decode(self.tools, type=list[dict[str, Any]]) if self.tools else None

    def parse_template_kwargs(self) -> dict[str, Any]:
        """The template's arguments."""
        return msgspec.json.decode(self.template_kwargs, type=dict[str, Any]) if self.template_kwargs else {}

    def parsed(self) -> dict[str, Any]:
        """All but the options, as a tokenizer takes them."""
        tools, template_kwargs = self.parse_tools(), self.parse_template_kwargs()
        generates = self.add_generation_prompt
        return {"tools": tools, "template_kwargs": template_kwargs, "add_generation_prompt": generates}


class SessionRef(msgspec.Struct, frozen=True):
    """The session that a request names."""

    name: str
    explicit: bool = True
    """False if the proxy chose the name, for a conversation without a session, and told it to the client."""


class GivenIds(msgspec.Struct, frozen=True):
    """Prompt ids as a client sent them."""

    field: str
    """The client's name for the field, for error messages."""
    raw: bytes
    """The JSON array, checked."""
    count: int
    after: str = "append_messages"
    """The client's name for the field with the messages that follow them."""
    first: int = 0
    """The index of the first of these messages in that field."""

    @property
    def is_prefix(self) -> bool:
        """Whether they are those of the first of `messages` (NeMo-RL's contract)."""
        return self.after == "messages"


class RetrySigns(msgspec.Struct, frozen=True):
    """The headers that show whether a request was sent before, and whether it may be sent again."""

    idempotency_key: bytes = b""
    retry_count: bytes = b""
    """Value of `x-stainless-retry-count`, which the OpenAI SDKs send from the first attempt on."""
    path: str = ""
    body: bytes = b""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for the next turn of a conversation."""

    fields: Mapping[str, msgspec.Raw]
    """The request for the engine: all fields but, of a chat completion, those that carry exact ids or
    appended messages."""
    headers: Headers
    """For the engine."""
    messages: bytes
    """JSON array of messages; empty if there are none."""
    rendering: Rendering
    model: str | None
    """The model that serves it; None for the engine's base model."""
    tenant: str
    session: SessionRef | None
    visible: Visible
    retry: RetrySigns
    stream: bool = False
    choices: int = 1
    """The number of requested completions of each prompt."""
    temperature: float | None = None
    """None for the engine's default."""
    off_policy: tuple[str, ...] = ()
    """The sampling parameters in which it differs from those that its session notes."""
    after_finish: bool = False
    """Whether its session was finished before it arrived."""
    session_limit: str = ""
    """The limit that its session has reached, so that no engine serves it; empty for none."""
    given: GivenIds | None = None
    """The exact prompt, on the token route; elsewhere ids with which it must begin."""
    append: bytes | None = None
    """JSON array of messages to append to the given ids."""
    images: tuple[str, ...] | None = None
    """The images of the given ids, in their order, as URLs or base64; None if the client named none."""
    images_field: str = "images"
    """The client's name for the field with `images`, for error messages."""
    media: tuple[str, ...] = ()
    """Next to given ids: those of `messages` and `append_messages` that hold images."""
    token_route: bool = False
    """Whether it arrived on the token route, where a history is never rendered."""
    special: str = ""
    """The `Reason` why the engine must render it even if its history was recorded; empty if none."""
    tokens: Mapping[int, tuple[str, ...]] = {}
    """What the client sent back unread with an assistant message, by the index of the message; see
    `tokenproxy.record.echo`."""
    echoed: Mapping[int, str] = {}
    """The ids of the turns that these tokens name, after they were verified."""
    thinking: ThinkingPolicy | None = None
    """None for the server's default."""
    echo_policy: EchoPolicy | None = None
    """None for the server's default."""
    findable: bool = True
    """Whether other requests may find its turn by its text: its scope was read, and its prompt renders that
    text."""
    prefill: bool = False
    """Whether the engine continues the last message, an assistant's, instead of rendering it as a turn."""
    record: bool = True
    must_record: bool = False
    """Whether it is refused if its turn would not be recorded; see `Request.turns_only`."""
    engine_route: EngineRoute = EngineRoute.CHAT
    prompts: tuple[GivenIds | None, ...] = ()
    """The prompts of a request without messages (completions, generate); None for one that the engine
    converts to ids."""
    prompt_media: bool = False
    """Whether `prompts` hold media."""
    routed_experts_start: int = 0
    """The number of prompt ids for which no routed experts are returned."""

    requested_model: str = ""
    """The client's name for `model` if that is another one (`model_aliases`); else empty."""

    @property
    def client_model(self) -> str | None:
        """The model as the client named it."""
        return self.requested_model or self.model

    @property
    def needs_token_in(self) -> bool:
        """Whether only an engine that takes prompt ids can serve it."""
        return self.given is not None


def media_kind(content: object) -> str | None:
    """The quoted type of the first content part that is not text, like `'image_url'`; None if all is text.

    It is found as vLLM does, because with media it ignores given prompt ids and renders.
    """
    if not isinstance(content, list):
        return None
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        media_keys = _MEDIA_KEYS.intersection(part) if isinstance(part, Mapping) else ()
        if media_keys or not isinstance(kind, str) or kind not in _TEXT_PARTS:
            return repr(kind)
    return None
