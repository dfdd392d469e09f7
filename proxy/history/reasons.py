"""Why a prompt is not simply an extension of all that was said before: a closed list."""

REASONS = {
    "first_turn": "the messages hold no assistant turn: there is nothing to continue",
    "no_match": "no turn recorded here ends where an assistant message of the request stands",
    "evicted": "the conversation was recorded, and had to make room since",
    "history_edited": "a message differs from what was recorded; what stands before it is kept exactly",
    "tools_changed": "the tools differ from those that the conversation began with",
    "template_kwargs_changed": "the template or its arguments differ from those of the conversation so far",
    "model_changed": "the conversation was held with another model, adapter or tokenizer",
    "unusable_turn": "the turn to continue was recorded without its exact ids",
    "media": "the messages hold images or other media: the engine must render them",
    "ends_with_assistant": "the last message is the assistant's own: there is nothing to append",
    "custom_template": "the request brings its own chat template",
    "special_request": "a field of the request asks for another rendering, or cannot stand beside ids",
    "template_unsupported": "for this template and these messages it is not certain what to append",
    "template_refused": "the template refuses the new messages",
    "no_tokenizer": "the model's tokenizer could not be loaded here",
    "tokenizer_mismatch": "the tokenizer here renders other ids than the engine",
    "tokenizer_unchecked": "the engine renders no conversation to compare the tokenizer with",
    "no_token_in": "the engine takes no exact prompts",
    "store_unavailable": "the store of recorded turns does not answer",
    "unreadable": "the messages are not what a chat completion takes: the engine's error says more",
    "no_ids": "the token route was given messages and no ids",
    "ids_given": "the client gave the ids",
    "prefix_given": "the client gave the ids of the first part; the rest is the template's rendering",
}
"""Values of `X-Prompt-Reason`, each with what it means."""
