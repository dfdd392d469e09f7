"""`POST /get_sequence_logprobs/` of `trl vllm-serve`: the log-probabilities of given sequences.

A distillation trainer scores what its student sampled with it. Each sequence is a completions request with
`prompt_logprobs`, whose one sampled id is discarded. Responses are those of TRL's server, in two formats:

    json    {"logprobs": for each sequence and id after its prompt a list, the most probable first,
             "logprob_token_ids": the ids of these}
    binary  the same as arrays of float32 and int32 in base64, of shape [sequences, longest, top_logprobs],
            padded with -inf and 0; "actual_logprobs_b64" and "actual_token_ids_b64" are those of the
            sequences' own ids
"""

import base64
import math
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from proxy.errors import BadRequest, EngineBroken
from proxy.fields import join, raw, read
from proxy.turn.engine_json import REFUSALS, parse_leniently
from proxy.types import Fields
from tokenization import InvalidIds, ids

_TOP_LOGPROBS = 100
"""TRL's default."""
_CLAMPED = -9999.0
"""What vLLM's completions route returns for minus infinity, which JSON does not have."""
_INFINITY = -math.inf


class ScoresFormat(StrEnum):
    """The format of a response."""

    JSON = "json"
    BINARY = "binary"


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One sequence of a request."""

    raw: bytes
    """The JSON array of its ids, checked."""
    count: int
    """The number of its ids."""
    prompt_length: int
    """The number of ids that are not scored."""


@dataclass(frozen=True, slots=True)
class ScoresRequest:
    """A request, parsed."""

    sequences: tuple[ScoredSequence, ...]
    top_logprobs: int
    temperature: float
    format: ScoresFormat

    def body_for_engine(self, sequence: ScoredSequence) -> bytes:
        """The completions request of one sequence."""
        fields: Fields = {
            "prompt": msgspec.Raw(sequence.raw),
            "max_tokens": raw(1),
            "temperature": raw(self.temperature),
            "prompt_logprobs": raw(self.top_logprobs),
        }
        return join(fields)


def parse_scores_request(fields: Fields) -> ScoresRequest:
    """Parse a request.

    Raises:
        BadRequest: a field is missing or wrong; `param` names it.
    """
    sequences = read(fields, "sequences", list[msgspec.Raw])
    lengths = read(fields, "prompt_lengths", list[int])
    if not sequences:
        raise BadRequest("`sequences` is required: a list of at least one list of ids", param="sequences")
    if lengths is None or len(lengths) != len(sequences):
        raise BadRequest("`prompt_lengths` must have one entry for each sequence", param="prompt_lengths")
    top, temperature = read(fields, "top_logprobs", int), read(fields, "temperature", float)
    if top is not None and top < 1:
        raise BadRequest("`top_logprobs` must be at least 1", param="top_logprobs")
    name = read(fields, "response_format", str) or ScoresFormat.JSON
    if name not in set(ScoresFormat):
        raise BadRequest("`response_format` must be `json` or `binary`", param="response_format")
    return ScoresRequest(
        tuple(
            _sequence(index, bytes(each), length)
            for index, (each, length) in enumerate(zip(sequences, lengths, strict=True))
        ),
        _TOP_LOGPROBS if top is None else top,
        1.0 if temperature is None else temperature,
        ScoresFormat(name),
    )


def _sequence(index: int, value: bytes, prompt_length: int) -> ScoredSequence:
    field = f"sequences[{index}]"
    try:
        value, count = ids.check_whole(value)
    except InvalidIds as error:
        raise BadRequest(f"`{field}` {error}", param=field) from error
    if not 0 <= prompt_length <= count:
        field = f"prompt_lengths[{index}]"
        raise BadRequest(f"`{field}` must be between 0 and the {count} ids of its sequence", param=field)
    return ScoredSequence(value, count, prompt_length)


# --- the response


class _Score(msgspec.Struct):
    logprob: float | None = None
    rank: int | None = None

    @property
    def value(self) -> float:
        if self.logprob is None:
            return math.nan
        return _INFINITY if self.logprob == _CLAMPED else self.logprob


class _Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []


_Position = dict[int, _Score]
"""The log-probabilities at one position, by id."""
_read_completion = msgspec.json.Decoder(_Completion).decode
_read_position = msgspec.json.Decoder(_Position | None).decode


class ScoresAnswer(ABC):
    """The response, put together from the completions of the sequences."""

    def __init__(self, request: ScoresRequest) -> None:
        self.request = request

    def add(self, index: int, body: bytes) -> None:
        """Add the completion of a sequence. Takes long for many log-probabilities: call it on a thread.

        Raises:
            EngineBroken: it holds not one entry for each id of the sequence.
        """
        sequence = self.request.sequences[index]
        positions = _positions(body)
        if positions is None or len(positions) != sequence.count:
            raise EngineBroken(
                "the engine returned no log-probabilities of the prompt, or not one for each id"
            )
        self._add(index, sequence, positions[sequence.prompt_length :])

    @abstractmethod
    def _add(self, index: int, sequence: ScoredSequence, positions: list[_Position]) -> None:
        """Keep the log-probabilities of the scored ids of a sequence, in few bytes."""

    @abstractmethod
    def body(self) -> bytes:
        """The JSON of the response, after all sequences were added."""


class JsonScores(ScoresAnswer):
    """The format `json`. What is no finite number is null."""

    def __init__(self, request: ScoresRequest) -> None:
        super().__init__(request)
        nothing = msgspec.Raw(b"[]")
        self._logprobs = [nothing] * len(request.sequences)
        self._tokens = [nothing] * len(request.sequences)

    def _add(self, index: int, sequence: ScoredSequence, positions: list[_Position]) -> None:
        ranked = [_ranked(each) for each in positions]
        self._logprobs[index] = raw(
            [[value if math.isfinite(value) else None for _, value in each] for each in ranked]
        )
        self._tokens[index] = raw([[token for token, _ in each] for each in ranked])

    def body(self) -> bytes:
        """See `ScoresAnswer.body`."""
        return msgspec.json.encode({"logprobs": self._logprobs, "logprob_token_ids": self._tokens})


class BinaryScores(ScoresAnswer):
    """The format `binary`. What is no number is minus infinity."""

    def __init__(self, request: ScoresRequest) -> None:
        super().__init__(request)
        self._lengths = [each.count - each.prompt_length for each in request.sequences]
        self._rows: dict[str, list[bytes]] = {name: [b""] * len(self._lengths) for name in _WIDE + _NARROW}

    def _add(self, index: int, sequence: ScoredSequence, positions: list[_Position]) -> None:
        top = self.request.top_logprobs
        logprobs, tokens = array("f"), array("i")
        for position in positions:
            best = _ranked(position)[:top]
            missing = top - len(best)
            logprobs.extend([*(_or_infinity(value) for _, value in best), *[_INFINITY] * missing])
            tokens.extend([*(token for token, _ in best), *[0] * missing])
        own = msgspec.json.decode(sequence.raw, type=list[int])[sequence.prompt_length :]
        actual = [each.get(token) for token, each in zip(own, positions, strict=True)]
        values = array("f", [_INFINITY if each is None else _or_infinity(each.value) for each in actual])
        # TRL's server names no id where the engine returned no log-probability of it
        named = array("i", [0 if each is None else token for token, each in zip(own, actual, strict=True)])
        arrays: tuple[array[Any], ...] = (logprobs, tokens, values, named)
        for name, numbers in zip(_WIDE + _NARROW, arrays, strict=True):
            self._rows[name][index] = numbers.tobytes()

    def body(self) -> bytes:
        """See `ScoresAnswer.body`."""
        longest, top = max(self._lengths), self.request.top_logprobs
        fields: dict[str, Any] = {}
        for name, rows in self._rows.items():
            size = longest * (top if name in _WIDE else 1)
            filler = array("f", [_INFINITY]) if "logprobs" in name else array("i", [0])
            whole = b"".join(row + filler.tobytes() * (size - len(row) // _BYTES) for row in rows)
            fields[name] = base64.b64encode(whole).decode()
        shape = [len(self._lengths), longest, top]
        return msgspec.json.encode({**fields, "shape": shape, "completion_lengths": self._lengths})


_WIDE = ("logprobs_b64", "token_ids_b64")
_NARROW = ("actual_logprobs_b64", "actual_token_ids_b64")
_BYTES = 4
"""Of a number in an array."""


def scores_answer(request: ScoresRequest) -> ScoresAnswer:
    """The response to a request, in its format."""
    return BinaryScores(request) if request.format is ScoresFormat.BINARY else JsonScores(request)


def _ranked(position: _Position) -> list[tuple[int, float]]:
    """The ids at one position with their log-probabilities, the most probable first."""
    by_rank = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return [(token, score.value) for token, score in by_rank]


def _or_infinity(value: float) -> float:
    return _INFINITY if math.isnan(value) else value


def _positions(body: bytes) -> list[_Position] | None:
    """The log-probabilities of the prompt in a completion; None if there are none. Raises EngineBroken."""
    try:
        completion = _read_completion(body)
        found = completion.choices[0].prompt_logprobs if completion.choices else None
        return None if found is None else [_read_position(each) or {} for each in found]
    except REFUSALS:
        value = parse_leniently(body)  # NaN is a number there
    try:
        listed = value["choices"][0]["prompt_logprobs"]
        return [msgspec.convert(each or {}, _Position, strict=False) for each in listed]
    except (msgspec.ValidationError, LookupError, TypeError):
        return None
