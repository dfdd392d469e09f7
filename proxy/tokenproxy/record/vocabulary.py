"""The closed vocabularies of the record: sources, reasons, problems, and causes of the end of a rollout."""

from enum import StrEnum


class Source(StrEnum):
    """Where a prompt came from: values of `X-Prompt-Source`."""

    EXTENDED = "extended"
    """Recorded ids, followed by what the chat template puts after them."""
    RENDERED = "rendered"
    """The engine rendered messages."""
    GIVEN = "given"
    """The client gave the ids."""


class _Explained(StrEnum):
    """A value with a sentence that explains it."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> "_Explained":
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member


class Reason(_Explained):
    """Why a prompt is not an extension of the whole recorded history: values of `X-Prompt-Reason`."""

    FIRST_TURN = "first_turn", "the messages hold no assistant turn: there is nothing to continue"
    NO_MATCH = "no_match", "no recorded turn ends at an assistant message of the request"
    EVICTED = "evicted", "the conversation was recorded and has been evicted since"
    HISTORY_EDITED = "history_edited", "a message differs from the recorded one; what precedes it stays exact"
    CALL_REPAIRED = (
        "call_repaired",
        "the client completed the JSON of a recorded tool call that was cut off: same turn, sampled ids kept",
    )
    CALL_IDS_RENAMED = (
        "call_ids_renamed",
        "the client renamed the ids of recorded tool calls: same turn, sampled ids kept",
    )
    INTEGERS_ROUNDED = (
        "integers_rounded",
        "the client rounded integers in recorded tool calls, as JavaScript does: same turn, sampled ids kept",
    )
    TEXT_DROPPED = (
        "text_dropped",
        "the client dropped the text next to recorded tool calls: same turn, sampled ids kept",
    )
    TEXT_STRIPPED = (
        "text_stripped",
        "the client dropped white space at the ends of a recorded text: same turn, sampled ids kept",
    )
    CHARACTER_CUT = (
        "character_cut",
        "the client ends a recorded text with U+FFFD, for a cut character: same turn, sampled ids kept",
    )
    AMBIGUOUS = "ambiguous", "several recorded turns with different ids fit, and nothing decides between them"
    TOOLS_CHANGED = "tools_changed", "the tools differ from those of the recorded conversation"
    TEMPLATE_KWARGS_CHANGED = (
        "template_kwargs_changed",
        "the chat template's arguments differ from those of the recorded conversation",
    )
    RENDERING_CHANGED = (
        "rendering_changed",
        "another field that this engine's rendering prints differs from the recorded conversation",
    )
    MODEL_CHANGED = "model_changed", "the conversation was held with another model, adapter or tokenizer"
    UNUSABLE_TURN = "unusable_turn", "the turn to continue was recorded without its exact ids"
    MEDIA = "media", "the messages hold media that cannot be sent with exact ids: the engine must render them"
    ENDS_WITH_ASSISTANT = "ends_with_assistant", "the last message is an assistant's: nothing to append"
    CUSTOM_TEMPLATE = "custom_template", "the request brings its own chat template"
    SPECIAL_REQUEST = "special_request", "a field of the request asks for a rendering that ids cannot give"
    TEMPLATE_UNSUPPORTED = (
        "template_unsupported",
        "the ids to append are not certain for this template and these messages",
    )
    TEMPLATE_REFUSED = "template_refused", "the chat template refuses the new messages"
    RENDERER_UNAVAILABLE = (
        "renderer_unavailable",
        "the engine renders the messages of this model, and none responded in time",
    )
    CONTEXT_OVERFLOW = (
        "context_overflow",
        "the recorded ids outgrew the model's context: the messages are rendered anew (`overflow: render`)",
    )
    THINKING_DROPPED = (
        "thinking_dropped",
        "the chat template leaves out reasoning of earlier turns: the messages are rendered anew "
        "(`thinking_policy: template`)",
    )
    NO_TOKENIZER = "no_tokenizer", "the model's tokenizer could not be loaded by the proxy"
    TOKENIZER_MISMATCH = "tokenizer_mismatch", "the proxy's tokenizer renders other ids than the engine"
    TOKENIZER_UNCHECKED = (
        "tokenizer_unchecked",
        "the engine rendered no conversation to compare the tokenizer with",
    )
    NO_TOKEN_IN = "no_token_in", "the engine takes no prompt ids"
    STORE_UNAVAILABLE = "store_unavailable", "the store of recorded turns does not respond, or not in time"
    UNREADABLE = "unreadable", "the messages are not those of a chat completion: see the engine's error"
    NO_IDS = "no_ids", "the token route got messages and no ids"
    IDS_GIVEN = "ids_given", "the client gave the ids"
    TEXT_PROMPT = "text_prompt", "the prompt of a completion is a text: the engine tokenises it"
    PREFIX_GIVEN = (
        "prefix_given",
        "`required_prefix_token_ids` or a message holds the first ids; the messages after them were appended",
    )


class Problem(_Explained):
    """What makes a turn untrainable."""

    NO_PROMPT_IDS = "no_prompt_ids", "the engine returned no prompt ids"
    NO_COMPLETION_IDS = "no_completion_ids", "the engine returned no completion ids"
    NO_LOGPROBS = "no_logprobs", "the engine returned no log-probabilities"
    IDS_MISSING = "ids_missing", "the engine returned fewer ids than log-probabilities"
    LOGPROBS_MISMATCH = "logprobs_mismatch", "the numbers of ids and log-probabilities differ"
    USAGE_MISMATCH = "usage_mismatch", "the engine counted another number of tokens than it returned ids"
    PROMPT_MISMATCH = "prompt_mismatch", "the engine used another prompt than the one sent to it"
    MEDIA = "media", "the prompt holds media other than images with exact ids"
    LOGPROBS_NOT_FINITE = "logprobs_not_finite", "a log-probability is infinite or not a number"
    LOGPROBS_NOT_PROCESSED = (
        "logprobs_not_processed",
        "`processed_logprobs_required` is set, and the log-probabilities leave out the temperature or other "
        "sampling parameters, or may: start vLLM with --logprobs-mode processed_logprobs",
    )
    UNREADABLE_EVIDENCE = (
        "unreadable_evidence",
        "the engine returned ids or log-probabilities of an unknown shape",
    )
    MISSING_PARENT = "missing_parent", "the turn continues one that is not stored"
    PROMPT_LENGTH_MISMATCH = (
        "prompt_length_mismatch",
        "the prompt is not as long as the turn before and what was appended",
    )


class Cause(StrEnum):
    """Why a rollout is finished."""

    REWARD = "reward"
    """The whole rollout got a reward; or a turn did, after the rollout was finished."""
    END = "end"
    """The client ended its session."""
    IDLE = "idle"
    """It was not used for `finish_after_s`."""


ABORTED = "abort"
"""The finish reason of a turn whose client left, or whose engine broke, before its end."""
BROKEN_OFF = (ABORTED, "error")
"""The finish reasons of turns that the engine did not end, as for a change of weights."""
