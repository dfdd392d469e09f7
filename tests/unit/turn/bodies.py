"""Completions as an engine sends them, whole and streamed."""

import json
from typing import Any

from tokenproxy.base.request import Visible
from tokenproxy.engine.sse import data_event, event_data
from tokenproxy.record.completion import Batch, Completion
from tokenproxy.turn import parsing, reader
from tokenproxy.turn.answer import Redactor
from tokenproxy.turn.usual import UsualChunk

Body = dict[str, Any]

NOTHING = Visible(ids=False, logprobs=False)
ODD = "@odd@"


def encoded(value: object, odd: str = "null", *, spaced: bool = False) -> bytes:
    """JSON as vLLM writes it, or as Python does if `spaced`, with the JSON `odd` in place of each `ODD`."""
    text = json.dumps(value, separators=None if spaced else (",", ":"))
    return text.replace(f'"{ODD}"', odd).encode()


def logprobs_of(*values: object) -> Body:
    """Log-probabilities as vLLM spells them."""
    return {"content": [{"token": "t", "logprob": one, "bytes": [], "top_logprobs": []} for one in values]}


def whole_choice(index: object = 0, **fields: Any) -> Body:
    """A choice of a whole completion; `fields` replace its own."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": "hi"},
        "logprobs": logprobs_of(-0.5, -0.25),
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 2],
        **fields,
    }


def whole(*choices: object, **fields: Any) -> Body:
    """A whole completion; `fields` replace its own."""
    return {
        "id": "c",
        "object": "chat.completion",
        "choices": list(choices) or [whole_choice()],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2 * max(len(choices), 1), "total_tokens": 4},
        "prompt_token_ids": [5, 6],
        **fields,
    }


def piece(index: object = 0, text: str | None = "h", ids: object = (7,), **fields: Any) -> Body:
    """A piece of a choice; `text` of None says nothing. `fields` replace its own."""
    ids = list(ids) if isinstance(ids, tuple) else ids
    return {
        "index": index,
        "delta": {} if text is None else {"content": text},
        "logprobs": logprobs_of(*[-0.5] * len(ids)) if isinstance(ids, list) else None,
        "finish_reason": None,
        "token_ids": ids,
        **fields,
    }


def end(index: object = 0, ids: object = (2,), **fields: Any) -> Body:
    """The last piece of a choice."""
    ended = piece(index, None, ids, **{"finish_reason": "stop", "stop_reason": None, **fields})
    return ended | {"token_ids": ended.pop("token_ids")}  # in the order of vLLM


def chunk(*choices: object, **fields: Any) -> Body:
    """A chunk of a stream."""
    return {"id": "c", "object": "chat.completion.chunk", "choices": list(choices), **fields}


class CompletionReader(reader.CompletionReader):
    """Reads the data of events."""

    def read(self, data: bytes) -> None:  # type: ignore[override]
        super().read(parsing.parse(data))


def read_completion(body: bytes, sent: bytes = b"", batch: Batch | None = None) -> Completion:
    """Read a whole completion."""
    return reader.read_completion(parsing.parse(body), sent, batch)


def redact_completion(body: bytes, visible: Visible) -> bytes:
    """Redact a whole completion."""
    return Redactor(visible).whole(parsing.parse(body), body, Completion())


def redact_chunk(redactor: Redactor, data: bytes) -> bytes | None:
    """Redact the data of an event as a stream does."""
    event = data_event(data)
    usual = UsualChunk.match(event)
    if usual is not None and usual.field:
        kept = redactor.usual(event, usual)
    else:
        kept = redactor.event(event, parsing.parse(data))
    return None if kept is None else event_data(kept)
