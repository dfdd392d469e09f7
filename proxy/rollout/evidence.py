"""What makes a turn fit to be trained on.

A turn is a sample only if the number of its ids equals that of its log-probabilities and of its mask's
entries, and the engine says nothing that contradicts them. What does not add up is refused with one of the
words below, never padded.
"""

PROBLEMS = {
    "no_prompt_ids": "the engine returned no prompt ids",
    "no_completion_ids": "the engine returned no ids of the completion",
    "no_logprobs": "the engine returned no log-probabilities",
    "logprobs_mismatch": "the numbers of ids and log-probabilities differ",
    "usage_mismatch": "the engine counted another number of tokens than it returned ids",
    "prompt_mismatch": "the engine used another prompt than the one it was given",
    "media": "the prompt holds images or other media, which ids alone do not describe",
}
"""The closed list of problems, with what each means."""
