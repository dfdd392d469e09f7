"""Refuses prompts that are longer than the model's context before they are tokenised."""

from proxy.errors import BadRequest
from proxy.fields import raw_value as present
from proxy.fields import read
from proxy.history.plan import ServedModel
from proxy.turn.request import ChatRequest, GivenIds


def too_long(
    count: int, max_model_len: int, param: str, *, at_least: bool = False, hint: str = ""
) -> BadRequest:
    """The error for a prompt longer than the context, with vLLM's message, because clients parse it."""
    number = f"at least {count}" if at_least else str(count)
    return BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{number} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of `{param}`.{hint}",
        param=param,
    )


def is_truncated(request: ChatRequest) -> bool:
    """Whether the request tells the engine to truncate the prompt."""
    return present(request.fields, "truncate_prompt_tokens") is not None


def check_ids_fit(request: ChatRequest, given: GivenIds, model: ServedModel) -> None:
    """Refuse given ids that are longer than the context, unless the engine is to truncate them.

    Raises:
        BadRequest: they are longer; `param` is the client's name for them.
    """
    if is_truncated(request):
        return
    if model.max_model_len is not None and given.count > model.max_model_len:
        raise too_long(given.count, model.max_model_len, given.field)


def most_prompt_ids(request: ChatRequest, max_model_len: int) -> int:
    """The most ids that a prompt may have so that the requested completion, or one id, fits after it."""
    for name in ("max_completion_tokens", "max_tokens"):
        try:
            if (requested := read(request.fields, name, int)) is not None:
                return max_model_len - max(1, requested)
        except BadRequest:
            continue  # the engine refuses it
    return max_model_len - 1
