"""Decides which part of a history stands for all of it where a template's tail is looked for."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from chat_tokenizer.errors import TemplateUnsupported
from chat_tokenizer.history_size import HistorySize, measured_limit
from chat_tokenizer.messages import Message, holds_media
from chat_tokenizer.new_texts import has_text
from chat_tokenizer.proof import Locality, Proof, answers_calls, prove, tried_values, with_thinking
from chat_tokenizer.renderer import Append, Renderer, RenderOptions
from chat_tokenizer.tails import Tails, TurnTail
from chat_tokenizer.turns import PLACEHOLDER_USER, placeholder_context, turn_context

_MAX_SECONDS_SHORTENING = 2.0
_LATER_ROLES = frozenset({"user", "assistant", "tool"})


class Discovery:
    """The tails of one template as its proof lets them be found. Safe to use from several threads."""

    def __init__(self, template: Renderer, tails: Tails) -> None:
        self.proof: Proof | None = None
        self.tails = tails
        self.computed = HistorySize()
        """The longest history after which an append is computed from its rendering, whatever is proved."""
        self._template = template
        self._proving = threading.Lock()
        self._changing = threading.Lock()

    def prove(self) -> Proof:
        """Prove which messages determine the text after a turn. The first call takes up to `MAX_SECONDS`."""
        with self._proving:
            return self.proof or self.adopt(prove(self.tails, self._template.syntax))

    def adopt(self, proof: Proof) -> Proof:
        """Adopt a proof from another process and keep the refutations of this one. Returns the result."""
        if self.proof is None and self._template.syntax.complete:
            self.computed = measured_limit(self._template)
        with self._changing:
            self.proof = proof if self.proof is None else self.proof.and_refuted_in(proof)
            return self.proof

    def is_local(self, new: Sequence[Message], options: RenderOptions) -> bool:
        """Whether it is proved that the text after a turn depends on no earlier message."""
        proof = self.proof
        if proof is None or proof.locality(new) is Locality.HISTORY or not self._tried(options):
            return False
        # a system message may be merged into the first one
        return self._template.syntax.complete or all(message.get("role") in _LATER_ROLES for message in new)

    def stands_alone(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> bool:
        """Whether the turn stands for all before it, which is proved; any turn, without a history.

        It does only where rendering the whole history is dear: after a long one, or where an engine renders.
        """
        if history is None:
            locality = self.prove().locality(new)
            alone = locality in (Locality.NEW, Locality.NEW_AFTER_STOP) and self._tried(options)
            # with arguments, no histories with images are tried
            return alone and not (options.kwargs and holds_media(new))
        complete = self._template.syntax.complete
        if complete and (self.computed.holds(history) or holds_media([*new, *history])):
            return False
        turn = history[-1]
        # a marker makes a turn without text another one, which only the whole rendering shows
        if not self.is_local(new, options) or not (turn.get("tool_calls") or has_text(turn.get("content"))):
            return False
        # without a source, a renderer may look for the call of any other result in earlier messages
        return complete or answers_calls(turn, new)

    def _tried(self, options: RenderOptions) -> bool:
        """Whether the proof tested these options: at most one argument that is read, and its value.

        It tested none without a generation prompt.
        """
        syntax = self._template.syntax
        read = {
            name: value
            for name, value in options.kwargs.items()
            if name in syntax.kwargs or not syntax.complete
        }
        effort = {name: value for name, value in read.items() if name == "reasoning_effort"}
        if effort and not syntax.complete and read == with_thinking(effort):
            read = effort
        if "documents" in options.kwargs or len(read) > 1 or not read.keys() <= syntax.kwargs.keys():
            return False
        if not options.add_generation_prompt and (read or not syntax.complete):
            return False
        # 1 is not True
        tried = {name: [(type(each), each) for each in tried_values(syntax, name)] for name in read}
        return all((type(value), value) in tried[name] for name, value in read.items())

    def refutation(
        self, new: Sequence[Message], history: Sequence[Message], options: RenderOptions
    ) -> list[Message] | None:
        """The shortest history found that contradicts the proof.

        None if the proof holds for this history. If it does not, the whole history is rendered from now on
        for messages like the new ones.
        """
        proof, append = self.proof, Append(history, new, options)
        if proof is None or not self.stands_alone(new, history, options):
            return None
        in_turn = self.tails.tail_in(append.after(turn_context(append.turn)))
        if in_turn is None or self.tails.holds(in_turn, append):
            return None
        self.adopt(proof.demoted(new, "an audit found that earlier messages decide what is printed"))
        return self._shortest(in_turn, append)

    def _shortest(self, tail: TurnTail, append: Append) -> list[Message]:
        """Remove messages while a difference remains: first half of the rest, at last single messages.

        Stops after `_MAX_SECONDS_SHORTENING`.
        """
        history = list(append.context)
        size, until = len(history) // 2, time.monotonic() + _MAX_SECONDS_SHORTENING
        while size:
            start = 0
            while start < len(history) - 1 and time.monotonic() < until:
                shorter = history[:start] + history[min(start + size, len(history) - 1) :]
                if self.tails.holds(tail, append.after(shorter)):
                    start += size
                else:
                    history = shorter
            size //= 2
        return history

    def turn_tail(
        self,
        new: Sequence[Message],
        history: Sequence[Message] | None,
        options: RenderOptions,
        *,
        alone: bool,
    ) -> TurnTail:
        """The tail of the last turn of `history`.

        Without a history, it is the tail of a placeholder turn that the new messages could follow.

        Args:
            alone: whether the turn stands alone; otherwise the whole history is rendered.

        Raises: as `ChatTokenizer.append`.
        """
        if history is None:
            # first, because if the template refuses the new messages themselves, its own error is more useful
            turn_tail, _ = self.tails.find(Append(placeholder_context(new), new, options))
            proof = self.prove()
            if not alone:
                raise TemplateUnsupported(
                    "what the template prints after a turn may depend on earlier messages: give `history` "
                    f"({proof.reason})"
                )
            after_stop = proof.locality(new) is Locality.NEW_AFTER_STOP
            return replace(turn_tail, after_stop=turn_tail.after_stop or after_stop)
        if alone:
            return self.tails.find(Append(turn_context(history[-1]), new, options))[0]
        # a reduced turn may have other syntax, but an engine is not asked for its renderings
        reduced = not self._template.syntax.complete
        context = turn_context(history[-1]) if reduced else [PLACEHOLDER_USER, history[-1]]
        return self.tails.after_history(
            Append(history, new, options), self.tails.tail_in(Append(context, new, options))
        )
