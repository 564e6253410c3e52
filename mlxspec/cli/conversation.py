"""A conversation with a model: its messages, and the session that answers them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.target import Progress
from ..errors import OptionError, PromptError
from ..generation.response import GenerationResponse
from ..generation.session import Session
from ..loading.chat_template import Messages
from .generating import room_for
from .prompts import in_template

_ANSWERS_SHARE = 4  # of the context a quarter is left for an answer, unless it may have less

Answering = Callable[..., Generator[GenerationResponse, None, None]]


def template_of(tokenizer: TokenizerWrapper) -> Callable[[Messages], list[int]]:
    """What puts messages into a model's chat template.

    Raises:
        OptionError: it has none.
    """
    if not tokenizer.has_chat_template:
        raise OptionError(
            "this model's tokenizer has no chat template: choose a model that was trained to "
            "chat, or 'mlxspec generate --raw'"
        )
    return partial(in_template, tokenizer=tokenizer)


class Conversation:
    """Keeps the messages within the model's context.

    Once they leave no room for an answer, the oldest turns are dropped until half of the context
    is free. So the next turns can go on where this one ends, and need not process everything
    again each time.

    Args:
        tokenize: puts messages into the model's chat template; see :func:`template_of`.
        stream: called with the prompt's tokens, ``max_tokens`` and ``session``.
        context_length: the model's, in tokens, where it is known.
        max_tokens: per answer.
        system_prompt: comes before all turns.
        trims_first_space: an answer, which is a text of its own, comes with a first space that
            the tokenizer has put there.

    Raises:
        OptionError: the model's chat template takes no system prompt.
    """

    def __init__(
        self,
        tokenize: Callable[[Messages], list[int]],
        stream: Answering,
        context_length: int | None,
        max_tokens: int,
        system_prompt: str | None = None,
        trims_first_space: bool = False,
    ) -> None:
        self._tokenize = tokenize
        self._stream = stream
        self.context_length = context_length
        self.max_tokens = max_tokens
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._trims = trims_first_space
        self._check_template()
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: Messages = []
        self.session = Session()
        self.dropped = 0
        """How many turns had to be left out for the last answer."""

    def answer(
        self, message: str, on_progress: Progress | None = None
    ) -> Generator[GenerationResponse, None, None]:
        """Answer a message; what has been said is kept when the generator is closed early.

        A message that got no answer at all is forgotten.

        Raises:
            PromptError: the message alone is longer than the model's context.
        """
        self.messages.append({"role": "user", "content": message})
        said = ""
        try:
            tokens = self._fitting_prompt()
            responses = self._stream(
                tokens,
                room_for(self.context_length, len(tokens), self.max_tokens),
                session=self.session,
                on_progress=on_progress,
            )
            try:
                for response in responses:
                    if not said and self._trims:
                        response = replace(response, text=response.text.removeprefix(" "))
                    said += response.text
                    yield response
            finally:
                responses.close()
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()

    def _fitting_prompt(self) -> list[int]:
        """The conversation's tokens, without the oldest turns once they leave no room."""
        tokens, length = self._tokens(), self.context_length
        self.dropped = 0
        if length is None or len(tokens) + min(self.max_tokens, length // _ANSWERS_SHARE) <= length:
            return tokens
        while len(tokens) > length // 2 and len(self.messages) > 1:
            del self.messages[:2]  # a turn of the user and the answer
            self.dropped += 1
            tokens = self._tokens()
        return tokens

    def _tokens(self) -> list[int]:
        return self._tokenize([*self._system, *self.messages])

    def _check_template(self) -> None:
        """Find out before the first turn that the template does not know system prompts."""
        if self._system:
            messages = [*self._system, {"role": "user", "content": "?"}]
            try:
                self._tokenize(messages)
            except (OptionError, PromptError) as error:
                raise OptionError(
                    "--system-prompt: this model's chat template takes none; write it into the "
                    "first message"
                ) from error
