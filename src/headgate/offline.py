"""`LLM`: runs an engine inside the process of a script.

    with LLM("path/to/model") as llm:
        for answer in llm.generate(["One", "Two"], SamplingParams(max_tokens=16)):
            print(answer.text)

The thread that waits for an answer runs the engine's loop; only the device has a thread of its own. Closing an
iterator or interrupting a call aborts its requests and releases their memory.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from headgate.config import EngineConfig
from headgate.contract.sampling import SamplingParams
from headgate.engine.build import Engine, build_engine
from headgate.engine.routed import RoutedTokens
from headgate.engine.vectors import read_vector
from headgate.errors import RequestError
from headgate.model_store.find import find_model
from headgate.model_store.pooling import read_pooling
from headgate.protocol.command import Command, Denied, Result
from headgate.protocol.message import Abort, CommandAnswer, CommandCall, StepOutputs, Submit
from headgate.protocol.output import Cause, Ended, Outputs, Refused, Timings
from headgate.protocol.plan import Logprobs, RoutedExperts, RoutedShape
from headgate.protocol.request import GenerateRequest, Pooling
from headgate.text.constraints import checked
from headgate.text.detokenizer import Detokenizer
from headgate.text.stops import StopStrings
from headgate.text.template import ChatTemplate, load_template
from headgate.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """One answer. It is complete when `finish_reason` is set."""

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] | None = None  # one entry per new token, if requested
    prompt_logprobs: list[Logprobs | None] | None = (
        None  # one entry per prompt token, if requested; None for the first, and before `prompt_logprobs_start`
    )
    weight_versions: list[tuple[int, int]] = field(default_factory=list)  # (version, number of new tokens), in order
    cached_tokens: int = 0
    finish_reason: str | None = None
    cause: Cause | None = None
    routed_experts: npt.NDArray[Any] | None = None  # [tokens with the prompt - 1, layers, top], if requested
    timings: Timings | None = None


class LLM:
    """A model ready to answer. `model` is a folder, a GGUF file or a hub id; None is the default model."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """`options` are those of `headgate.config.EngineConfig`."""
        self._mail: dict[int, _PendingCompletion] = {}
        self._answers: dict[int, Result] = {}
        self._ids = count(1)
        files = find_model(None if model is None else str(model))
        self.tokenizer: Tokenizer | None = load_tokenizer(files.path)
        self.template: ChatTemplate | None = load_template(files.path)
        self.pooling: Pooling = read_pooling(files.path) or "last"
        self.engine: Engine = build_engine(files.path, EngineConfig(**{"kv_listen": None, **options}), self._deliver)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()

    # -- requests ---------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        generated: Sequence[Sequence[int]] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Return the answers to one or many prompts (text or token ids), in the order of the prompts.

        `generated` has, for each prompt, the token ids of a partial answer. With the same seed and weights the answer
        continues as if it had never been interrupted. The completion includes these tokens.
        """
        listed = _as_list(prompts)
        partial = _partial(generated, listed)
        answers = [
            self._answer(prompt, each, stop, ids)
            for prompt, each, ids in zip(listed, _each(params, listed), partial, strict=True)
        ]
        self._finish(answers, tqdm(total=len(answers), desc="generating", unit="answer", disable=_hidden(progress)))
        return [answer.completion for answer in answers]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        progress: bool = True,
    ) -> npt.NDArray[np.float32]:
        """Return the vectors of one or many prompts (text or token ids) as an array `[prompts, dimensions]`.

        `pooling` is that of the checkpoint by default, or the hidden state of the last token. `dimensions` keeps the
        first numbers of each vector; `normalize` scales it to length 1 after that.
        """
        hidden = self.engine.info.hidden
        if dimensions is not None and not 1 <= dimensions <= hidden:
            raise RequestError(f"dimensions must be between 1 and {hidden}", param="dimensions")
        params, pooling = SamplingParams(max_tokens=0), pooling or self.pooling
        answers = [self._answer(prompt, params, (), pooling=pooling) for prompt in _as_list(prompts)]
        self._finish(answers, tqdm(total=len(answers), desc="embedding", unit="prompt", disable=_hidden(progress)))
        vectors = [read_vector(answer.vector, dimensions, normalised=normalize) for answer in answers]
        return np.stack(vectors) if vectors else np.empty((0, dimensions or hidden), np.float32)

    def _finish(self, answers: Sequence[_PendingCompletion], bar: tqdm[Any]) -> None:
        with interrupts_deferred(self.engine.loop.wake) as interrupted, bar, closing(self._run(answers)) as turns:
            for _ in turns:
                bar.update(sum(answer.done for answer in answers) - bar.n)
                if interrupted.is_set():
                    break

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Yield the answer to one prompt, piece by piece. Closing the iterator aborts the request."""
        answer = self._answer(prompt, params or SamplingParams(), stop)
        # Closed explicitly, because since Python 3.12 a closed generator may keep its inner iterator open.
        with closing(self._run([answer])) as turns:
            for _ in turns:
                if fresh := answer.take_text():
                    yield fresh
        # Yield the text that arrived while another call ran the loop.
        if fresh := answer.take_text():
            yield fresh

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any) -> Completion:
        """Return the next message of a conversation; `template` is passed to the model's chat template."""
        return self.generate([self.render(messages, **template)], params, progress=False)[0]

    def render(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """Return the prompt that the model's chat template makes of `messages`, as token ids."""
        if self.template is None or self.tokenizer is None:
            raise RequestError("this model has no chat template; give a prompt instead", param="messages")
        # The template writes the special tokens itself.
        return self.tokenizer.encode(self.template.render(messages, **template), add_special=False)

    def call(self, command: Command) -> Result:
        """Run a control command (`headgate.protocol.command`) on the engine."""
        number = next(self._ids)
        self.engine.loop.post(CommandCall(0, number, command))
        while number not in self._answers:
            with interrupts_deferred(self.engine.loop.wake):
                self.engine.loop.turn()
        result = self._answers.pop(number)
        if isinstance(result, Denied):
            error = RequestError(result.message, code=result.code)
            error.status = result.status
            raise error
        return result

    # -- running ----------------------------------------------------------------

    def _run(self, answers: Sequence[_PendingCompletion]) -> Generator[None, None, None]:
        """Run the engine's loop until all `answers` are done, yielding after each turn."""
        mine = {next(self._ids): answer for answer in answers}
        self._mail |= mine
        try:
            self.engine.loop.post(Submit([answer.request(id) for id, answer in mine.items()]))
            while not all(answer.done for answer in answers):
                with interrupts_deferred(self.engine.loop.wake):
                    self.engine.loop.turn()
                    self._stop_at_strings(mine)
                yield
        finally:
            with interrupts_deferred():
                self._leave(mine)

    def _stop_at_strings(self, answers: Mapping[int, _PendingCompletion]) -> None:
        if matched := [id for id, answer in answers.items() if answer.stopped and not answer.done]:
            self.engine.loop.post(Abort(matched, "stop_string"))

    def _leave(self, answers: Mapping[int, _PendingCompletion]) -> None:
        """Abort unfinished answers and wait until the engine has released them all, unless it is closed."""
        if self.engine.loop.closed:
            return
        if unfinished := [id for id in answers if self._mail.pop(id, None) is not None]:
            self.engine.loop.post(Abort(unfinished, "client_disconnect"))
            self.engine.loop.turn()
        while self.engine.scheduler.has_any(answers):
            self.engine.loop.turn()

    def _deliver(self, client: int, message: StepOutputs | CommandAnswer) -> None:
        if isinstance(message, CommandAnswer):
            self._answers[message.number] = message.result
        else:
            self._handle_outputs(message.outputs)

    def _handle_outputs(self, outputs: Outputs) -> None:
        for i, (id, token) in enumerate(zip(outputs.ids, outputs.tokens, strict=True)):
            if answer := self._mail.get(id):
                answer.add_token(token, outputs.version, outputs.logprobs.get(i))
        for id, scores in outputs.prompt_logprobs.items():
            if answer := self._mail.get(id):
                answer.add_prompt_logprobs(scores)
        for id, experts in outputs.routed.items():
            if answer := self._mail.get(id):
                answer.add_routed(experts)
        for id, vector in outputs.vectors.items():
            if answer := self._mail.get(id):
                answer.add_vector(vector)
        ends: list[Ended | Refused] = [*outputs.ended, *outputs.refused]
        for end in ends:
            if answer := self._mail.pop(end.id, None):
                answer.end(end)

    def _answer(
        self,
        prompt: Prompt,
        params: SamplingParams,
        stop: Sequence[str],
        generated: Sequence[int] = (),
        pooling: Pooling | None = None,
    ) -> _PendingCompletion:
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        if not all(isinstance(token, int) for token in ids):
            raise RequestError("a prompt is text or a list of token ids", param="prompt")
        if stop and self.tokenizer is None:
            raise RequestError("this model has no tokenizer; stop strings need one", param="stop")
        if params.grammar is not None:
            checked(params.grammar)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        routed = self.engine.info.routed
        return _PendingCompletion(tuple(ids), params, self.tokenizer, stop, tuple(generated), routed, pooling)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids", param="prompt")
        return self.tokenizer.encode(text)


class _PendingCompletion:
    """A completion that is being generated."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        generated: tuple[int, ...],
        routed: RoutedShape | None,
        pooling: Pooling | None,
    ) -> None:
        # The first token of a prompt has no logprobs: nothing precedes it.
        unscored: list[Logprobs | None] = [None] * min(max(1, params.prompt_logprobs_start), len(prompt))
        scored = None if params.prompt_logprobs is None else unscored
        self.completion = Completion(prompt, prompt_logprobs=scored)
        self._params = params
        self._generated = generated
        self._pooling = pooling
        self._vector: bytes | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt) if tokenizer else None
        self._stops = StopStrings(stop)
        asked = routed is not None and params.return_routed_experts
        self._routed = RoutedTokens(routed, params.routed_experts_prompt_start) if routed and asked else None
        self._taken = 0  # characters already streamed
        self._refused: Refused | None = None
        for token in generated:
            if not self.stopped:
                self._add(token)

    @property
    def done(self) -> bool:
        if self._refused is not None:
            raise RequestError(self._refused.message, param=self._refused.param, code=self._refused.code)
        return self.completion.finish_reason is not None

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    def request(self, id: int) -> GenerateRequest:
        prompt, generated, pooling = self.completion.prompt_token_ids, self._generated, self._pooling
        try:
            return GenerateRequest(id, prompt, self._params, generated=generated, pooling=pooling)
        except ValueError as error:
            raise RequestError(str(error), param="prompt") from error

    def take_text(self) -> str:
        fresh = self.completion.text[self._taken :]
        self._taken += len(fresh)
        return fresh

    def add_token(self, token: int, version: int, logprobs: Logprobs | None) -> None:
        if self.stopped:
            return
        if logprobs is not None:
            self.completion.logprobs = self.completion.logprobs or []
            self.completion.logprobs.append(logprobs)
        self._note_version(version)
        self._add(token)

    def _add(self, token: int) -> None:
        self.completion.token_ids.append(token)
        if self._detokenizer is not None:
            self.completion.text += self._stops.push(self._detokenizer.push((token,)))

    def _note_version(self, version: int) -> None:
        spans = self.completion.weight_versions
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))

    def add_prompt_logprobs(self, scores: Iterable[Logprobs]) -> None:
        assert self.completion.prompt_logprobs is not None
        self.completion.prompt_logprobs += scores

    def add_vector(self, vector: bytes) -> None:
        self._vector = vector

    @property
    def vector(self) -> bytes:
        """The vector of the prompt; raises if the request has ended without one."""
        if self._vector is None:
            raise RequestError(f"the request ended before its vector was computed ({self.completion.cause})")
        return self._vector

    def add_routed(self, experts: Iterable[RoutedExperts]) -> None:
        assert self._routed is not None
        self._routed.add(experts)

    def end(self, end: Ended | Refused) -> None:
        if isinstance(end, Refused):
            self._refused = end
            return
        completion = self.completion
        if self._detokenizer is not None:
            completion.text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        completion.cached_tokens, completion.timings = end.cached_tokens, end.timings
        completion.finish_reason, completion.cause = end.finish_reason, end.cause
        if self.stopped:
            completion.finish_reason, completion.cause = "stop", "stop_string"
        if self._routed is not None:
            tokens = len(completion.prompt_token_ids) + len(completion.token_ids)
            experts = self._routed.of_answer(tokens)
            completion.routed_experts = None if experts is None else experts.array()


@contextmanager
def interrupts_deferred(wake: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Defer Ctrl-C to the end of this context; `wake` then interrupts a wait inside the context.

    Otherwise, KeyboardInterrupt could leave the scheduler inconsistent, or be lost in a callback that drops
    exceptions.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        wake()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        raise KeyboardInterrupt


def _hidden(progress: bool) -> bool | None:
    """Whether a progress bar is hidden; None: unless standard error is a terminal."""
    return None if progress else True


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _partial(generated: Sequence[Sequence[int]] | None, prompts: list[Prompt]) -> Sequence[Sequence[int]]:
    if generated is None:
        return [()] * len(prompts)
    if len(generated) != len(prompts):
        raise RequestError(
            f"{len(prompts)} prompts but {len(generated)} entries in generated; give one for each prompt, empty or not",
            param="generated",
        )
    return generated


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: list[Prompt]
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(prompts)} prompts but {len(params)} sampling parameters; give one for each prompt, or one for all"
        )
    return params
