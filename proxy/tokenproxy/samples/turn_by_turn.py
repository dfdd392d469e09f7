"""Samples told turn by turn, each with its whole prompt: OpenEnv's training traces and harbor's trajectories.

A row thus grows with the square of the number of turns, as both formats require. Texts are the recorded
messages, never decoded ids. Where they cannot be read, OpenEnv's turns lack request and response, and
harbor's steps are the sampled ones, without text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenproxy.samples.samples import Sample, TurnSpan
from tokenproxy.samples.tree import parsed

_SOURCES = {"assistant": "agent", "user": "user"}
"""ATIF's sources by role; all other roles are `system`."""


class _Sampled(NamedTuple):
    """One turn of a sample."""

    span: TurnSpan
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def openenv_turns(sample: Sample, metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of OpenEnv's `TrainingTurn` for each turn; `metadata` are those of the sample."""
    return [
        {
            "node_id": turn.span.id,
            "prompt_token_ids": turn.prompt,
            "completion_token_ids": turn.ids,
            "per_token_logps": turn.logprobs,
            "loss_mask": [0] * len(turn.prompt) + [int(turn.span.trained)] * len(turn.ids),
            **_exchange(sample, turn.span),
            "metadata": {
                **metadata,
                "node_id": turn.span.id,
                "reward": sample.reward,
                "temperature": turn.span.temperature,
            },
        }
        for turn in _turns(sample)
    ]


def atif_agent(sample: Sample) -> dict[str, Any]:
    """ATIF's `agent`. Its name and version are those of the session's metadata, else `unknown`."""
    stated = sample.metadata or {}
    return {
        "name": str(stated.get("agent_name", "unknown")),
        "version": str(stated.get("agent_version", "unknown")),
        "model_name": sample.model,
        "tool_definitions": sample.tools or None,
    }


def atif_steps(sample: Sample) -> list[dict[str, Any]]:
    """ATIF's `steps`: a message each, but for results of tools, which belong to the step that called them.

    Steps of an agent whose mask is not 1 are marked as copied context, on which no trainer may train.
    """
    messages: list[Any] = [{}] * len(sample.turns) if sample.messages is None else sample.messages
    sampled = {
        place if turn.span.message_index is None else turn.span.message_index: turn
        for place, turn in enumerate(_turns(sample))
    }
    steps: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = "assistant" if index in sampled else message.get("role", "")
        if role in ("tool", "function"):
            _add_result(steps, message)
            continue
        steps.append({"step_id": len(steps) + 1, "source": _SOURCES.get(role, "system"), **_content(message)})
        if role == "assistant":
            steps[-1] |= {**_actions(message), "is_copied_context": True}
        if index in sampled:
            steps[-1] |= _metrics(sampled[index])
    return steps


def _add_result(steps: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add the result of a tool to the last step, or to one of the system where nobody could call a tool."""
    if not steps or steps[-1]["source"] == "user":
        steps.append({"step_id": len(steps) + 1, "source": "system", "message": ""})
    calls = {call["tool_call_id"] for call in steps[-1].get("tool_calls") or ()}
    call_id, content = message.get("tool_call_id"), _content(message)
    result = {"source_call_id": call_id if call_id in calls else None, "content": content.pop("message")}
    steps[-1].setdefault("observation", {"results": []})["results"].append(result | content)


def _turns(sample: Sample) -> Iterator[_Sampled]:
    for span in sample.turns:
        logprobs = [value for value in sample.logprobs[span.start : span.end] if value is not None]
        prompt = sample.prompt_ids + sample.completion_ids[: span.start]
        yield _Sampled(span, prompt, sample.completion_ids[span.start : span.end], logprobs)


def _exchange(sample: Sample, span: TurnSpan) -> dict[str, Any]:
    """OpenEnv's `request` and `response`."""
    if sample.messages is None or span.message_index is None:
        return {"request": {}, "response": {}}
    choice = {"message": sample.messages[span.message_index], "finish_reason": span.finish_reason}
    return {
        "request": {"messages": sample.messages[: span.message_index], "tools": sample.tools or None},
        "response": {"choices": [choice]},
    }


def _content(message: dict[str, Any]) -> dict[str, Any]:
    """ATIF's `message`: text. If the content has other parts, the whole of it is in `extra`."""
    content = message.get("content")
    if not isinstance(content, list):
        return {"message": content or ""}
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    parts = [{"type": "text", "text": text} for text in texts if text is not None]
    return {"message": parts} | ({"extra": {"content": content}} if None in texts else {})


def _actions(message: dict[str, Any]) -> dict[str, Any]:
    """ATIF's reasoning and tool calls; arguments that are no JSON object are in a call's `extra`."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        stated = function.get("arguments")
        arguments = parsed(str(stated).encode(), dict)
        extra = {"extra": {"arguments": stated}} if arguments is None else {}
        names = {"tool_call_id": str(call.get("id")), "function_name": str(function.get("name"))}
        calls.append({**names, "arguments": arguments or {}, **extra})
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return {"tool_calls": calls or None, "reasoning_content": reasoning}


def _metrics(turn: _Sampled) -> dict[str, Any]:
    """What ATIF says about a sampled step."""
    span = turn.span
    return {
        "llm_call_count": 1,
        "is_copied_context": not span.trained,
        "metrics": {
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(turn.ids),
            "prompt_token_ids": turn.prompt,
            "completion_token_ids": turn.ids,
            "logprobs": turn.logprobs,
            "extra": {"turn": span.id, "finish_reason": span.finish_reason, "reward": span.reward},
        },
    }
