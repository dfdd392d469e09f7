"""Text to ids and back, with a private copy of the tokenizer that all threads share.

Invariant: nothing changes the copy after it is made. If one thread changes a `tokenizers.Tokenizer` (its
truncation, padding or added tokens) while another one reads it, version 0.21 fails with "Already borrowed",
and 0.23 encodes with the change. So the copy is private: callers of transformers change its own tokenizer.
"""

from collections.abc import Sequence

from tokenization.errors import InvalidMessages


class Encoder:
    """Encodes and decodes with the vocabulary of a `tokenizer.json`. Safe to use from several threads."""

    def __init__(self, description: str) -> None:
        """Parse the content of a `tokenizer.json`. This holds the GIL for about 50 ms per 50,000 tokens.

        So make an encoder where a model is loaded, not in the first request that needs it.
        """
        from tokenizers import Tokenizer  # slow to import, so only when needed

        self._tokenizer = Tokenizer.from_str(description)
        # a tokenizer.json may enable both; engines encode whole prompts without padding
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    # `Tokenizer.encode` and `Tokenizer.decode` hold the GIL; their batch variants release it

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS or other tokens around it. Releases the GIL.

        Raises:
            InvalidMessages: the text holds half of a surrogate pair.
        """
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # a lone surrogate: half of a character that was cut in two
            raise InvalidMessages(
                "the text is not valid Unicode: it holds half of a surrogate pair"
            ) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. To read and compare only: encoding it gives other ids.

        Releases the GIL.
        """
        text: str = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The token of each id as the vocabulary spells it; empty for ids without one."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]
