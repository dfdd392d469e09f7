"""The ids of a path of turns, as the page reads them: a JSON header and three binary arrays.

    4 bytes      length of the JSON in bytes, little-endian
    JSON         see `Header`; padded with spaces, so that the arrays begin at a multiple of 4
    int32[n]     ids
    float32[n]   log-probabilities of sampled ids, NaN for all others
    uint8[n]     flags: a `Provenance`, plus `TRAINED`

128,000 ids take 1.2 MB and no parsing; as JSON they would take 3 MB and be parsed on the page's only thread.
"""

from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum

import msgspec
import numpy as np

from chat_tokenizer import ChatTokenizer
from tokenproxy.record.turn import Turn, unpack_alternatives
from tokenproxy.record.vocabulary import Source
from tokenproxy.samples.tree import TurnTree

TRAINED = 4
"""The flag of ids whose loss mask is 1 in the turn's sample."""


class Provenance(IntEnum):
    """Where an id comes from."""

    RENDERED = 0
    """The engine rendered it with the chat template, with the rest of the prompt."""
    APPENDED = 1
    """The chat template put it after recorded ids."""
    SAMPLED = 2
    """The model sampled it."""
    GIVEN = 3
    """The client gave it."""


_PROVENANCE: dict[str, Provenance] = {
    Source.RENDERED: Provenance.RENDERED,
    Source.EXTENDED: Provenance.APPENDED,
    Source.GIVEN: Provenance.GIVEN,
}


class TurnIds(msgspec.Struct, frozen=True):
    """Where the ids of one turn are: [start, sampled) was appended to the prompt, [sampled, end) sampled."""

    id: str
    start: int
    sampled: int
    end: int
    weight_versions: list[tuple[str, int, int]]
    """[version, start, end) of ids that were sampled with these weights, or with one of several."""
    weights_uncertain: bool
    """As `Turn.weights_uncertain`."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the arrays mean."""

    count: int
    turns: list[TurnIds]
    texts: dict[str, str]
    """The bytes of each id, one character for one byte (latin-1), because a token may be a part of one."""
    special: list[int]
    note: str
    """Why texts are missing or may be wrong; empty if neither."""
    alternatives: list[tuple[int, list[tuple[str, float]]]]
    """[index, [[text, logprob], ...]] where the engine returned the most probable tokens."""


def encode_tokens(
    path: Sequence[Turn],
    tree: TurnTree,
    tokenizer: ChatTokenizer | None,
    note: str = "",
    untrained: Collection[str] = (),
) -> bytes:
    """The body for the path that ends with its last turn.

    Args:
        tokenizer: None if the ids cannot be spelled.
        note: see `Header.note`.
        untrained: ids of turns that are not trained on although they can be.
    """
    ids, logprobs, flags = [], [], []
    turns: list[TurnIds] = []
    alternatives: list[tuple[int, list[tuple[str, float]]]] = []
    start = 0
    for turn in path:
        appended, completion = packed_ids(turn.appended), packed_ids(turn.completion)
        sampled = start + len(appended)
        end = sampled + len(completion)
        provenance = _PROVENANCE.get(turn.source, Provenance.RENDERED)
        trained = 0 if turn.id in untrained or tree.fault(turn) else TRAINED
        ids += [appended, completion]
        logprobs += [np.full(len(appended), np.nan, "<f4"), _logprobs(turn, len(completion))]
        flags.append(np.full(len(appended), provenance, np.uint8))
        flags.append(np.full(len(completion), Provenance.SAMPLED | trained, np.uint8))
        for index, found in enumerate(unpack_alternatives(turn.alternatives), start=sampled):
            alternatives.append((index, [(text.decode("latin-1"), logprob) for text, logprob in found]))
        spans = [(span.version, sampled + span.start, sampled + span.end) for span in turn.weight_versions]
        turns.append(TurnIds(turn.id, start, sampled, end, spans, turn.weights_uncertain))
        start = end
    all_ids = np.concatenate(ids)
    header = Header(
        count=len(all_ids),
        turns=turns,
        texts=spell(all_ids, tokenizer),
        special=sorted(set(np.unique(all_ids).tolist()) & tokenizer.special_ids) if tokenizer else [],
        note=note,
        alternatives=alternatives,
    )
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 4)
    arrays = (all_ids, np.concatenate(logprobs), np.concatenate(flags))
    return b"".join([len(encoded).to_bytes(4, "little"), encoded, *(each.tobytes() for each in arrays)])


def packed_ids(packed: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """Packed ids as an array that shares their memory."""
    return np.frombuffer(packed[: len(packed) // 4 * 4], "<i4")


def prompt_ids(path: Sequence[Turn]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """The whole prompt of the last turn of a path."""
    parts = [packed_ids(packed) for turn in path[:-1] for packed in (turn.appended, turn.completion)]
    return np.concatenate([*parts, packed_ids(path[-1].appended)])


def ids_of(path: Sequence[Turn]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """The whole prompt of the last turn of a path, and what it sampled."""
    return np.concatenate([prompt_ids(path), packed_ids(path[-1].completion)])


def spell(ids: Iterable[int], tokenizer: ChatTokenizer | None) -> dict[str, str]:
    """The texts of ids, as `Header.texts`."""
    if tokenizer is None:
        return {}
    known = (token for token in np.unique(np.asarray(ids, np.int64)).tolist() if token >= 0)
    return {str(token): text.decode("latin-1") for token, text in tokenizer.token_bytes(known).items()}


def _logprobs(turn: Turn, count: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """One for each sampled id; all NaN unless the turn has exactly as many."""
    if len(turn.logprobs) != 4 * count:
        return np.full(count, np.nan, "<f4")
    return np.frombuffer(turn.logprobs, "<f4")
