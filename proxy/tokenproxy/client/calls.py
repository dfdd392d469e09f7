"""The requests of a client as values: what is sent, and how its response is read. Does no input or output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Unpack
from urllib.parse import quote

import httpx
import msgspec

from tokenproxy.client.errors import (
    NoResponse,
    ProxyError,
    TemporaryFailure,
    TooManyRequests,
    UnreadableResponse,
    error_of,
)
from tokenproxy.client.values import (
    FeedConsumer,
    FeedPage,
    FeedSelection,
    ModelInfo,
    SampleSelection,
    SessionFields,
    SessionInfo,
    SessionSampleList,
    TokenTurn,
)

T = TypeVar("T")

TIMEOUT_S = 60.0
"""Seconds for a response, in addition to the time that the proxy waits for a rollout."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
"""There are none: a trainer has more turns in work than the 100 requests that httpx sends at once by default.
A pool that keeps a limit may also close a connection under another thread's request (httpcore issue 1110)."""
LONGEST_PAUSE_S = 10.0
"""Seconds between two attempts."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and what its response means."""

    method: str
    path: str
    """Percent-encoded."""
    read: Callable[[httpx.Response], T]
    """Raises msgspec.DecodeError, UnicodeDecodeError or LookupError."""
    query: Sequence[tuple[str, str]] = ()
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = TIMEOUT_S
    """For the response; None for no limit."""

    def result(self, response: httpx.Response) -> T:
        """What a response means, its body read. Raises ErrorResponse or UnreadableResponse."""
        if response.status_code >= 400:
            raise error_of(response)
        try:
            return self.read(response)
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
            raise UnreadableResponse(f"{self.method} {response.url}: {error}") from error


class Address:
    """Where the requests of a client go, and with which key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` is that of the proxy, with or without `/v1`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        """The root of the proxy."""
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def arguments(self, call: Call[Any]) -> dict[str, Any]:
        """The keyword arguments of `httpx.Client.request`."""
        headers = {**call.headers, **self._headers}
        content = None
        if call.body is not None:
            content = msgspec.json.encode(call.body)
            headers["content-type"] = "application/json"
        return {
            "method": call.method,
            "url": self.url + call.path,
            "params": list(call.query) or None,
            "content": content,
            "headers": headers,
            "timeout": httpx.Timeout(call.timeout_s, connect=10.0),
        }

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises NoResponse or UnreadableResponse for the errors of a request with httpx."""
        try:
            yield
        except httpx.TransportError as error:
            raise NoResponse(f"no response of {self.url}: {error or type(error).__name__}") from error
        except httpx.DecodingError as error:
            raise UnreadableResponse(f"{self.url}: {error}") from error


def repeatable(selection: FeedSelection) -> FeedSelection:
    """A selection that many requests can read: an iterator gives its values only once."""
    if "weight_versions" in selection:
        selection = {**selection, "weight_versions": tuple(selection["weight_versions"])}
    if "classes" in selection:
        selection = {**selection, "classes": tuple(selection["classes"])}
    return selection


class Patience:
    """How long to repeat a request that fails only for now."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds` without any response until the error is raised."""
        self._seconds = seconds
        self._clock = clock
        self._since: float | None = None
        self._pause_s = 0.25

    def pause(self, error: ProxyError) -> float:
        """Seconds to wait before the next attempt. Raises the error if there should be none."""
        if not isinstance(error, NoResponse | TemporaryFailure | TooManyRequests):
            raise error
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._seconds:
            raise error
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        retry_after_s = None if isinstance(error, NoResponse) else error.retry_after_s
        return max(self._pause_s, min(retry_after_s or 0.0, LONGEST_PAUSE_S))


# --- one function for each method of the clients


def models() -> Call[list[ModelInfo]]:
    """The models that the engines serve, base model and adapters."""
    return Call("GET", "/v1/models", _field("data", list[ModelInfo]))


def create_session(session: str | None = None, **fields: Unpack[SessionFields]) -> Call[SessionInfo]:
    """Create a session, or change its description.

    Args:
        session: its name; None lets the proxy choose one.
    """
    if unknown := fields.keys() - SessionFields.__annotations__.keys():
        raise TypeError(f"a session has no field {min(unknown)!r}")
    body = {name: value for name, value in {"id": session, **fields}.items() if value is not None}
    return Call("POST", "/v1/sessions", _reader(SessionInfo), body=body)


def session(session: str, *, ids: bool = False) -> Call[SessionInfo]:
    """A session with its turns; `ids` adds their ids and log-probabilities."""
    query = [("ids", "true")] if ids else []
    return Call("GET", _session_path(session), _reader(SessionInfo), query=query)


def delete_session(session: str) -> Call[None]:
    """Remove a session with all its turns."""
    return Call("DELETE", _session_path(session), _nothing)


def end_session(session: str) -> Call[bool]:
    """End a session: no request follows. False if the feed has it already, or it has no turns."""
    return Call("POST", _session_path(session, "/end"), _field("finished", bool))


def set_reward(session: str, reward: float, *, turn: str | None = None) -> Call[dict[str, float]]:
    """Set the reward of a session, which finishes it, or of one turn. Returns all its rewards."""
    return set_rewards(session, {turn or "": reward})


def set_rewards(session: str, rewards: Mapping[str, float]) -> Call[dict[str, float]]:
    """Set the rewards of turns by their ids, and of the session by "". Returns all its rewards."""
    path, body = _session_path(session, "/reward"), {"rewards": dict(rewards)}
    return Call("POST", path, _field("rewards", dict[str, float]), body=body)


def samples(session: str, **selection: Unpack[SampleSelection]) -> Call[SessionSampleList]:
    """The training samples of one session."""
    query = _selected(selection)
    return Call("GET", _session_path(session, "/samples"), _reader(SessionSampleList), query=query)


def _selected(selection: SampleSelection) -> list[tuple[str, str]]:
    """The part of a query that selects samples."""
    query = [("layout", selection.get("layout", "plain")), ("shared", selection.get("shared", "once"))]
    query += [("class", name) for name in selection.get("classes", ())]
    return [*query, ("on_policy", "true")] if selection.get("on_policy") else query


def read_feed(
    consumer: str | None = None,
    *,
    after: str | None = None,
    wait_s: float = 0.0,
    **selection: Unpack[FeedSelection],
) -> Call[FeedPage]:
    """Finished rollouts after a cursor, else after what the consumer acknowledged, else all.

    Args:
        wait_s: seconds to wait until there is one.
    """
    metadata, versions = selection.get("metadata"), selection.get("weight_versions", ())
    query = [("wait", f"{wait_s:g}"), ("limit", str(selection.get("limit", 16)))]
    query += [("metadata", f"{key}={value}") for key, value in (metadata or {}).items()]
    query += [*(("weight_version", version) for version in versions), *_selected(selection)]
    if consumer is not None:
        query.append(("consumer", consumer))
    if after is not None:
        query.append(("after", after))
    return Call("GET", "/v1/samples", _reader(FeedPage), query=query, timeout_s=wait_s + TIMEOUT_S)


def acknowledge(consumer: str, cursor: str) -> Call[str]:
    """Note that a consumer has processed everything up to a cursor; returns the acknowledged cursor."""
    body = {"consumer": consumer, "cursor": cursor}
    return Call("POST", "/v1/samples/ack", _field("cursor", str), body=body)


def consumers() -> Call[list[FeedConsumer]]:
    """The consumers of the feed, and how far each has read."""
    return Call("GET", "/v1/samples/consumers", _field("data", list[FeedConsumer]))


def forget_consumer(consumer: str) -> Call[None]:
    """Remove a consumer; if it reads again, it starts with the first rollout."""
    return Call("DELETE", f"/v1/samples/consumers/{quote(consumer, safe='')}", _nothing)


def token_turn(
    prompt_ids: Sequence[int] | None = None,
    append_messages: Sequence[Mapping[str, Any]] | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    session: str | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> Call[TokenTurn]:
    """Sample one turn on exact ids, with log-probabilities.

    Args:
        prompt_ids: the exact prompt: `TokenTurn.ids` of the turn before. None for a first turn.
        append_messages: messages to append to it: tool results, user text.
        messages: those of a first turn; or, with `prompt_ids`, the history that led to them.
        session: the rollout that records the turn.
        timeout_s: for the response; None for no limit.
        options: other fields of a chat completion: `model`, `temperature`, `tools`, ...

    Raises:
        ValueError: `stream` or `n` is among the options.
    """
    if options.get("stream") or options.get("n", 1) != 1:
        raise ValueError("a token turn is one whole response: leave out `stream` and `n`")
    given = {"prompt_ids": prompt_ids, "append_messages": append_messages, "messages": messages}
    body = {"logprobs": True, **options} | {name: value for name, value in given.items() if value is not None}
    return Call(
        "POST",
        "/v1/chat/completions/tokens",
        _read_turn,
        body=body,
        headers={} if session is None else {"x-session-id": session},
        timeout_s=timeout_s,
    )


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    prompt_token_ids: list[int]
    choices: list[_Choice]


def _read_turn(response: httpx.Response) -> TokenTurn:
    completion = msgspec.json.decode(response.content, type=_Completion)
    choice = completion.choices[0]
    logprobs = choice.logprobs.content if choice.logprobs else None
    return TokenTurn(
        prompt_ids=completion.prompt_token_ids,
        completion_ids=choice.token_ids,
        logprobs=None if logprobs is None else [entry.logprob for entry in logprobs],
        message=choice.message,
        finish_reason=choice.finish_reason,
        session=response.headers.get("x-session-id"),
        turn=response.headers.get("x-turn-id"),
    )


def _reader(kind: type[T]) -> Callable[[httpx.Response], T]:
    return lambda response: msgspec.json.decode(response.content, type=kind)


def _field(name: str, kind: type[T]) -> Callable[[httpx.Response], T]:
    """Reads one field of a JSON object."""

    def read(response: httpx.Response) -> T:
        fields = msgspec.json.decode(response.content, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(fields[name], type=kind)

    return read


def _nothing(response: httpx.Response) -> None:
    """The response says no more than its status."""


def _session_path(session: str, what: str = "") -> str:
    # a slash in a name is spelled so, because paths hold none
    return f"/v1/sessions/{quote(session.replace('/', '=2F'), safe='')}{what}"
