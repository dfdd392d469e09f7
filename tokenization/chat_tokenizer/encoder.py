"""Text to ids and back, with a private copy of the tokenizer that all threads share.

Invariant: nothing changes the copy after it is created. If one thread changes a `tokenizers.Tokenizer` (its
truncation, padding or added tokens) while another one reads it, version 0.21 fails with "Already borrowed",
and 0.23 encodes with the change. So the copy is private: callers of transformers change its own tokenizer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from chat_tokenizer.errors import InvalidMessages, Stopped, TemplateUnsupported, TooManyIds
from chat_tokenizer.pieces import Cutter, read_description
from chat_tokenizer.token_bytes import TokenBytes

MAX_PIECE = 2**22
"""Most characters in one call of the tokenizer, which takes 100 to 200 bytes of memory for each."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Ends the tokenising of a text early."""

    max_ids: int | None = None
    """None for no limit."""
    stopped: Callable[[], bool] = bool
    """Returns whether the caller no longer waits; called between the pieces of a long text."""

    def plus(self, more: int) -> "Limit":
        """The limit for a text with `more` ids of context, which do not count."""
        return self if self.max_ids is None else replace(self, max_ids=self.max_ids + more)

    def check(self, count: int, *, at_least: bool = False) -> None:
        """Raise TooManyIds if `count` is over the limit, and Stopped if the caller no longer waits."""
        if self.stopped():
            raise Stopped
        if self.max_ids is not None and count > self.max_ids:
            raise TooManyIds(count, self.max_ids, at_least=at_least)


NO_LIMIT = Limit()


class Encoder:
    """Encodes and decodes with the vocabulary of a `tokenizer.json`. Safe to use from several threads."""

    def __init__(self, description: str) -> None:
        """Parse the content of a `tokenizer.json`. This holds the GIL for about 50 ms per 50,000 tokens.

        So make an encoder where a model is loaded, not in the first request that needs it.
        """
        from tokenizers import Tokenizer  # slow to import, so only when needed

        self.description = description
        self._tokenizer = Tokenizer.from_str(description)
        # a tokenizer.json may enable both; engines encode whole prompts without padding
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        parts = read_description(description)
        self._cutter = Cutter(parts)
        self._token_bytes = TokenBytes(parts)

    # `Tokenizer.encode` and `Tokenizer.decode` hold the GIL; their batch variants release it

    def encode(self, text: str, limit: Limit = NO_LIMIT) -> list[int]:
        """The ids of a text, without BOS or other tokens around it. Releases the GIL.

        Raises:
            InvalidMessages: the text holds half of a surrogate pair.
            TooManyIds: it has more ids than `limit` allows. Most such texts are not tokenised completely.
            Stopped: `limit.stopped` returned True.
            TemplateUnsupported: it is longer than `MAX_PIECE`, and the tokenizer merges across all of it.
        """
        ids: list[int] = []
        for piece in self._cutter.pieces(text):
            if len(piece) > MAX_PIECE:
                raise TemplateUnsupported(
                    f"{len(piece)} characters cannot be cut exactly for this tokenizer, and at most "
                    f"{MAX_PIECE} are tokenised at once: send less text"
                )
            ids += self._encode(piece)
            limit.check(len(ids), at_least=len(piece) < len(text))
        return ids

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # a lone surrogate: half of a character that was cut in two
            raise InvalidMessages(
                "the text is not valid Unicode: it holds half of a surrogate pair"
            ) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with special tokens. Only read or compare it: encoding it may give other ids.

        Releases the GIL.
        """
        text: str = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The token of each id as the vocabulary spells it; empty for ids without one."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def token_bytes(self, ids: Iterable[int]) -> dict[int, bytes]:
        """What each of the ids stands for; those without a token are missing. See `TokenBytes`."""
        tokens = {token: self._tokenizer.id_to_token(token) for token in set(ids)}
        return {token: self._token_bytes.of(text) for token, text in tokens.items() if text is not None}
