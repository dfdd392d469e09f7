"""Reads the samples that `tokenproxy export` wrote, and rebuilds the turns of each rollout.

A sample holds all ids of its path and the span of ids that each turn sampled. Samples of one rollout share
turns, so together they are a tree. An export does not contain refused turns.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tokenproxy.record.store import Session
from tokenproxy.record.turn import PromptImage, Turn, WeightSpan, pack_ids, pack_logprobs, request_time
from tokenproxy.samples.layouts import PLAIN
from tokenproxy.samples.samples import UNCHANGED, Sample
from tokenproxy.viewer.recording import RecordedSession

_PARQUET = b"PAR1"


class NotAnExport(Exception):
    """A file cannot be read as an export; the message says what to do."""


def read_export(file: Path) -> list[RecordedSession]:
    """The rollouts of an export, in the order of the file.

    Raises:
        NotAnExport: it is no export with the plain layout, it is damaged, or it is a Parquet file while
            pyarrow is missing.
        OSError: it cannot be read.
    """
    with file.open("rb") as opened:
        parquet = opened.read(len(_PARQUET)) == _PARQUET
    samples = list(_from_parquet(file) if parquet else _from_json_lines(file))
    rollouts: dict[tuple[str, str], list[Sample]] = {}
    for number, sample in enumerate(samples, start=1):
        if fault := _fault(sample):
            raise NotAnExport(f"{file}, sample {number}: {fault}")
        rollouts.setdefault((sample.tenant, sample.rollout), []).append(sample)
    return [_recording(group) for group in rollouts.values()]


def _from_json_lines(file: Path) -> Iterator[Sample]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield msgspec.json.decode(line, type=Sample)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise NotAnExport(
                    f"{file}, line {number} is no sample ({error}): pass a file of "
                    "`tokenproxy export --layout plain`"
                ) from error


def _from_parquet(file: Path) -> Iterator[Sample]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise NotAnExport(
            f"{file} is a Parquet file: pip install 'tokenproxy[parquet]', or export with --format jsonl"
        ) from error
    nested = PLAIN.named("json")
    for row in pyarrow.parquet.read_table(file).to_pylist():
        try:
            yield msgspec.convert(row | {name: msgspec.json.decode(row[name]) for name in nested}, Sample)
        except (KeyError, TypeError, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise NotAnExport(
                f"{file} holds other columns ({error}): pass a file of `tokenproxy export --layout plain`"
            ) from error


def _fault(sample: Sample) -> str:
    """Why no turns can be rebuilt from a sample; empty if they can be."""
    places = [place for span in sample.turns for place in (span.start, span.end)]
    if not sample.turns:
        return "it has no turns"
    if places != sorted(places) or places[0] < 0 or places[-1] > len(sample.completion_ids):
        return "the spans of its turns are not in order within `completion_ids`"
    if len(sample.logprobs) != len(sample.completion_ids):
        return "`logprobs` and `completion_ids` differ in length"
    mask = [0] * len(sample.completion_ids)
    for span in sample.turns:
        mask[span.start : span.end] = [int(span.trained)] * (span.end - span.start)
    if sample.loss_mask != mask:
        return "`loss_mask` is not what `trained` of its turns says"
    return ""


def _recording(samples: Sequence[Sample]) -> RecordedSession:
    turns: dict[str, Turn] = {}
    for sample in samples:
        for turn in _turns(sample):
            turns.setdefault(turn.id, turn)
    first = samples[0]
    session = Session(
        id=first.rollout,
        explicit=first.session,
        ambiguous=first.ambiguous,
        created=min(turn.created for turn in turns.values()),
        used=max(turn.created for turn in turns.values()),
        turns=len(turns),
        metadata=msgspec.json.encode(first.metadata or {}),
    )
    own = {span.id: span.reward for sample in samples for span in sample.turns if span.reward is not None}
    shared = next((each.reward for each in samples if each.leaf not in own and each.reward is not None), None)
    rewards = own if shared is None else {**own, "": shared}
    trained = {span.id for sample in samples for span in sample.turns if span.trained}
    in_order = sorted(turns.values(), key=lambda turn: turn.id)
    return RecordedSession(session, in_order, rewards, frozenset(turns.keys() - trained))


def _turns(sample: Sample) -> Iterator[Turn]:
    """The turns of a sample's path."""
    end = 0
    for index, (span, (messages, message)) in enumerate(zip(sample.turns, _messages(sample), strict=True)):
        first = index == 0
        appended = sample.prompt_ids if first else sample.completion_ids[end : span.start]
        logprobs = [value for value in sample.logprobs[span.start : span.end] if value is not None]
        prompt_tokens, end = len(sample.prompt_ids) + span.start, span.end
        yield Turn(
            id=span.id,
            rollout=sample.rollout,
            parent=None if first else sample.turns[index - 1].id,
            request=span.id,
            created=request_time(span.id),
            model=sample.model,
            tools=msgspec.json.encode(sample.tools or []) if first else None,
            template_kwargs=msgspec.json.encode(sample.template_kwargs or {}) if first else None,
            messages=msgspec.json.encode(messages),
            message=msgspec.json.encode(message),
            appended=pack_ids(appended),
            completion=pack_ids(sample.completion_ids[span.start : span.end]),
            logprobs=pack_logprobs(logprobs),
            prompt_tokens=prompt_tokens,
            images=_images(sample, prompt_tokens - len(appended), prompt_tokens),
            weight_versions=tuple(
                WeightSpan(each.version, each.start - span.start, each.end - span.start)
                for each in span.weight_versions
            ),
            segments=tuple(
                replace(each, start=each.start - span.start, end=each.end - span.start)
                for each in span.segments
            ),
            request_class=span.request_class,
            **{name: getattr(span, name) for name in UNCHANGED},
        )


def _images(sample: Sample, start: int, end: int) -> tuple[PromptImage, ...]:
    """The images in the ids [start, end) of a sample, without their data."""
    return tuple(
        PromptImage(image.offset, image.length, image.digest, kind="", data=b"")
        for image in sample.images
        if start <= image.offset < end
    )


def _messages(sample: Sample) -> list[tuple[list[Any], dict[str, Any]]]:
    """For each turn its new messages and its answer."""
    messages, turns = sample.messages or [], len(sample.turns)
    answers = [span.message_index for span in sample.turns if span.message_index is not None]
    if len(answers) < turns or not all(0 <= answer < len(messages) for answer in answers):
        return [(messages if index == 0 else [], {}) for index in range(turns)]
    starts = [0, *(index + 1 for index in answers[:-1])]
    return [(messages[start:end], messages[end]) for start, end in zip(starts, answers, strict=True)]
