"""How a chat template closes assistant turns, read from its renderings.

A close ends with the token that the model samples last. To distinguish it from the opening of the next
message, a turn is rendered as the last message and with others after it.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile

from chat_tokenizer.added_tokens import AddedTokens, Token, common_prefix_length
from chat_tokenizer.cache import BoundedCache, digest
from chat_tokenizer.errors import TemplateUnsupported, TokenizationError
from chat_tokenizer.histories import ANY_TOOLS, result
from chat_tokenizer.messages import Message, Tools
from chat_tokenizer.new_texts import with_argument
from chat_tokenizer.renderer import Append, Renderer, RenderOptions
from chat_tokenizer.turns import MARK, PLACEHOLDER_USER, Tail, placeholder_context, render_tail


@dataclass(frozen=True, slots=True)
class ContentClose:
    """How a template closes a turn without tool calls."""

    text: str
    """The text up to the token that ends the turn; empty if the opening of the next message ends it."""
    closers: frozenset[int]
    """Ids of the special tokens in it."""
    stop: int | None
    """The last of them, which the model samples last."""


class Closes:
    """The closes of one template with one tokenizer. Safe to use from several threads."""

    def __init__(self, template: Renderer, added: AddedTokens) -> None:
        self._template = template
        self._added = added
        self._content_closes: BoundedCache[bytes, ContentClose] = BoundedCache(256)

    def of_call(self, tail: Tail, close: ContentClose) -> tuple[int, int, frozenset[int], bool]:
        """The close of a turn with tool calls: its start and end in the tail, the ids of its tokens, and
        whether the text before them is shown.

        It starts with the white space after the calls, and with the words of the content close, without which
        its start is not shown. Example: 12 and 23 in `</tool_call>\n<|im_end|>\n`, with the content close
        `<|im_end|>`.
        """
        start, end, closers = self._tokens_after_call(tail, close)
        first = next(iter(self._added.find(close.text, special=True)), None)
        words = close.text[: first.start if first else None].strip()
        before = tail.text[:start].rstrip()
        shown = before.endswith(words) or words in tail.text[start:end]
        return len(before.removesuffix(words).rstrip()), end, closers, shown

    def _tokens_after_call(self, tail: Tail, close: ContentClose) -> tuple[int, int, frozenset[int]]:
        """As `of_call`, without some of the text before the first token."""
        lead = tail.text[: tail.lead]
        shared = self._added.shared(lead, tail.text_if_last)
        # where a message follows only: a token that opens messages too does not close the turn there
        searched = lead[:shared] if close.closers & self._first_tokens else lead
        start = lead[:shared].rfind(close.text) if close.text.strip() else -1
        if start < 0 and close.closers:
            start = searched.find(close.text)
        if start >= 0:
            return self._with_earlier_stop(lead, start, start + len(close.text), close.closers)
        # the text before the token that closes a turn may differ from turn to turn
        stop = next((t for t in self._added.find(searched, special=True) if t.id == close.stop), None)
        if stop is not None:
            return self._with_earlier_stop(lead, stop.start, stop.end, frozenset({stop.id}))
        if not tail.text_if_last:
            raise TemplateUnsupported("the template does not show where its tool calls end")
        token_if_last = self._added.id_at(tail.text_if_last, shared)
        tokens = self._closing_tokens(lead, shared)
        stops = self._added.stop_ids - self.result_openers
        if close.text and (stop := next((token for token in tokens if token.id in stops), None)):
            return self._start_of_close(lead, stop, close), stop.end, frozenset({stop.id})
        # the opening of a next message of any kind does not end the turn
        openers = (self._openers - {token.id for token in tokens}) | self.result_openers
        found = self._added.find(lead[:shared], special=True)
        shared = next((token.start for token in found if token.id in openers), shared)
        own = [token for token in tokens if token.end <= shared]
        stop = next((t for t in own if t.id in self._added.stop_ids), None)
        if not close.text and stop is not None:
            return stop.start, stop.end, frozenset({stop.id})
        # without a close of its own the opening of the next message ends the turn: GLM, and Gemma 4, which
        # closes the turn only if no result follows
        if not close.text or token_if_last in self._added.stop_ids | close.closers or not own:
            return shared, shared, frozenset()
        first = next((token for token in own if token.id in close.closers), own[-1])
        ids = frozenset(token.id for token in own if token.start >= first.start)
        return first.start, own[-1].end, ids

    def _with_earlier_stop(
        self, lead: str, start: int, end: int, closers: frozenset[int]
    ) -> tuple[int, int, frozenset[int]]:
        """A close, beginning with the stop token before it that ends a turn's calls, if there is one.

        Example: Apertus closes calls with `<|tools_suffix|>`, and the turn with `<|assistant_end|>` after it.
        """
        found = self._added.find(lead[:start])
        if found and found[-1].id in self._added.stop_ids and not lead[found[-1].end : start].strip():
            return found[-1].start, end, closers | {found[-1].id}
        return start, end, closers

    def _start_of_close(self, lead: str, stop: Token, close: ContentClose) -> int:
        """Where the close begins that ends with a stop token: it may begin as that of a turn without calls.

        Example: HyperCLOVAX closes calls with `<|im_end|><|stop|>`, texts with `<|im_end|><|endofturn|>`.
        """
        in_close = {token.id for token in self._added.find(close.text)}
        start = stop.start
        for token in reversed(self._added.find(lead[: stop.start])):
            if token.end != start or token.id not in in_close:
                break
            start = token.start
        return start

    def of_content(self, options: RenderOptions) -> ContentClose:
        """How the template closes a turn without tool calls."""
        key = digest(options.key(), self._template.now())
        return self._content_closes.get_or_make(key, lambda: self._find_content_close(options))

    def _find_content_close(self, options: RenderOptions) -> ContentClose:
        context = [*self._setting[0], PLACEHOLDER_USER, {"role": "assistant", "content": "."}]
        tail, _ = render_tail(
            self._template, Append(context, [{"role": "user", "content": "qZuserZq"}], options)
        )
        lead = tail.text[: tail.lead]
        shared = self._added.shared(lead, tail.text_if_last)
        closing = self._closing_tokens(lead, shared) or self._only_stop(lead, tail.text_if_last, shared)
        if not closing:
            # the white space before the close may depend on what follows
            stripped = lead.lstrip()
            shared_stripped = self._added.shared(stripped, tail.text_if_last.lstrip())
            closing = self._closing_tokens(lead, len(lead) - len(stripped) + shared_stripped)
        text = lead[: closing[-1].end] if closing else lead[:shared]
        stop = closing[-1].id if closing else None
        return ContentClose(text, frozenset(token.id for token in closing), stop)

    def _closing_tokens(self, lead: str, shared: int) -> list[Token]:
        """The special tokens that are printed after a turn whether or not a message follows."""
        tokens = [token for token in self._added.find(lead, special=True) if token.end <= shared]
        # some templates always print the opening of another message; its tokens open messages
        closing = [token for token in tokens if token.id not in self._openers]
        if closing:
            return closing
        # others print a message of their own before each first one, and close it as any other
        opening = {token.id for token in self._added.find(self._generation_prompt)}
        stops = [token for token in tokens if token.id in self._added.stop_ids - opening]
        return stops[:1] or [token for token in tokens[:1] if token.id == self._closer_of_user]

    def _only_stop(self, lead: str, text_if_last: str, shared: int) -> list[Token]:
        """The token that ends a turn which messages follow, where the last turn ends differently."""
        tokens = self._added.find(lead, special=True)
        token_if_last = self._added.id_at(text_if_last, shared)
        if token_if_last in self._added.special_ids - (self._openers - self._added.stop_ids):
            # GPT-OSS: the last turn ends with <|return|>, earlier ones with <|end|>
            at_end = [token for token in tokens if token.start == shared]
            # where the template takes one role only, all that shows is that nothing opens with the token
            at_end = [token for token in at_end if token.id not in self._first_tokens]
            return [token for token in at_end if self.closes_turn(token.id, False) is not False]
        # the last turn has no close; the first of several tokens does not open the next message
        stops = [token for token in tokens[:-1][:1] if token.id in self._added.stop_ids - self._openers]
        return [] if self._added.find(text_if_last, special=True) else stops

    @cached_property
    def _setting(self) -> tuple[list[Message], Tools | None]:
        """A system message and tools, if the template refuses conversations without them."""
        system: Message = {"role": "system", "content": "."}
        preambles: list[list[Message]] = [[], [system]]
        for tools, preamble in product((None, ANY_TOOLS), preambles):
            with suppress(TokenizationError):
                self._template.text([*preamble, PLACEHOLDER_USER], RenderOptions(tools))
                return preamble, tools
        return [], None

    def _text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, preamble: bool = True
    ) -> str:
        """The rendering of messages, after the messages that the template needs; empty if it refuses them."""
        before, tools = self._setting
        try:
            whole = [*(before if preamble else []), *messages]
            return self._template.text(whole, RenderOptions(tools, add_generation_prompt))
        except TokenizationError:
            return ""

    @cached_property
    def _openers(self) -> frozenset[int]:
        """Ids of the special tokens that open messages: nothing was closed before the first message."""
        system = {"role": "system", "content": MARK}
        found = []
        texts = (
            self._text([{"role": "user", "content": MARK}], add_generation_prompt=False),
            self._text([system, PLACEHOLDER_USER], add_generation_prompt=False, preamble=False),
        )
        for text in texts:
            before, mark, after = text.partition(MARK)
            if mark:
                found.append({token.id for token in self._added.find(before, special=True)})
            if mark and not found[1:] and not self._generation_prompt:
                found[0] |= {token.id for token in self._added.find(after, special=True)[1:]}
        # a template may print a message of its own, and close it, before the first; not before each first
        return frozenset.intersection(*map(frozenset, found)) if found else frozenset()

    @cached_property
    def result_openers(self) -> frozenset[int]:
        """Ids of the tokens that open tool results only: they stand between two results, never after both."""
        texts = ("qZfirstZq", "qZsecondZq")
        results = [result(index, text) for index, text in enumerate(texts)]
        text = self._text([*placeholder_context(results), *results], add_generation_prompt=True)
        first, second = (text.rfind(word) for word in texts)
        if not 0 <= first < second:
            return frozenset()
        tokens = self._added.find(text, special=True)
        between = {token.id for token in tokens if first < token.start < second}
        return frozenset(
            between - {token.id for token in tokens if token.start > second} - self._first_tokens
        )

    def closes_turn(self, token: int, in_call: bool) -> bool | None:
        """Whether a special token after a turn closes it; False if it opens the next message, else None.

        A token that closes turns is printed for every role of the next message, and never before the
        first text of a conversation, because nothing is to be closed there.
        """
        followed = self._after_call if in_call else self._after_content
        if any(token not in tokens for tokens in followed):
            return False
        return True if len(followed) > 1 and token not in self._first_tokens else None

    @cached_property
    def _first_tokens(self) -> set[int]:
        """Ids of the special tokens before the first text of a conversation."""
        text = self._text([{"role": "user", "content": MARK}], add_generation_prompt=False)
        tokens = self._added.find(text, special=True)
        ends = [0, *(token.end for token in tokens)]
        before = takewhile(
            lambda pair: not text[pair[0] : pair[1].start].strip(), zip(ends, tokens, strict=False)
        )
        return {token.id for _, token in before}

    @cached_property
    def _after_content(self) -> list[set[int]]:
        return self._special_after({"role": "assistant", "content": MARK})

    @cached_property
    def _after_call(self) -> list[set[int]]:
        *_, turn = placeholder_context([result()])
        return self._special_after({**turn, "tool_calls": [with_argument(turn["tool_calls"][0], MARK)]})

    def _special_after(self, turn: Message) -> list[set[int]]:
        """Ids of the special tokens between a turn and a message, for each role that the template takes."""
        found = []
        for following in (*({"role": role} for role in ("user", "assistant", "system")), result()):
            messages: list[Message] = [PLACEHOLDER_USER, turn, {**following, "content": "qZnextZq"}]
            text = self._text(messages, add_generation_prompt=False)
            between, printed, _ = text.partition(MARK)[2].partition("qZnextZq")
            if printed:
                found.append({token.id for token in self._added.find(between, special=True)})
        return found

    @cached_property
    def _closer_of_user(self) -> int | None:
        """The id of the first special token after a user's text."""
        text = self._text([{"role": "user", "content": MARK}], add_generation_prompt=True)
        return next((token.id for token in self._added.find(text.partition(MARK)[2], special=True)), None)

    @cached_property
    def _generation_prompt(self) -> str:
        """The text that `add_generation_prompt` adds; empty if it adds none."""
        without = self._text([PLACEHOLDER_USER], add_generation_prompt=False)
        with_prompt = self._text([PLACEHOLDER_USER], add_generation_prompt=True)
        return with_prompt[len(without) :] if without and with_prompt.startswith(without) else ""

    @cached_property
    def last_of_prompt(self) -> int | None:
        """The id of the added token that ends a prompt; None if text does."""
        prompt = self._text([PLACEHOLDER_USER], add_generation_prompt=True)
        return self._added.id_at_end(prompt)

    def assistant_header(self) -> str:
        """The text before an assistant's content that history and generation prompt have in common.

        Example: `<|im_start|>assistant\n`, also where the generation prompt continues with `<think>\n`.
        """
        turn = {"role": "assistant", "content": MARK}
        prompt = self._generation_prompt
        question = self._text([PLACEHOLDER_USER], add_generation_prompt=False)
        answered = self._text([PLACEHOLDER_USER, turn, PLACEHOLDER_USER], add_generation_prompt=True)
        if not prompt or MARK not in answered:
            return ""
        end = common_prefix_length(question + prompt, answered[: answered.find(MARK)])
        return (question + prompt)[len(question) : end]
