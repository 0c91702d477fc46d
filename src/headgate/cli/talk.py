"""`headgate run` and `headgate chat`: answers in the terminal, of a model in this process or of a server.

Ctrl-C stops an answer. Its text so far stays on the screen and in the conversation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from headgate.cli.serve import checked_key
from headgate.cli.tls import add_url_ca, url_tls
from headgate.errors import HeadgateError, RequestError

if TYPE_CHECKING:
    from headgate.config import TlsFiles
    from headgate.offline import LLM

Message = Mapping[str, str]
INTERRUPTED = 130
SILENT_S = 300.0  # a server that sends nothing for this long is considered lost
HELP = "Ctrl-C stops an answer, Ctrl-D ends the chat, /new starts a new conversation."


class Unanswered(HeadgateError):
    pass


class Responder(Protocol):
    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Yield the next message of a conversation in pieces. Closing the generator stops the answer."""


def add_run(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate run MODEL|URL [PROMPT] [options]"
    command.epilog = "Without PROMPT, the prompt is read from standard input. Ctrl-C stops the answer."
    command.set_defaults(run=run)
    command.add_argument("model", metavar="MODEL|URL", help="folder, GGUF file or hub id; or the URL of a server")
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question")
    add_sampling(command)


def add_chat(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate chat [MODEL|URL] [options]"
    command.epilog = HELP
    command.set_defaults(run=chat)
    add = command.add_argument
    add("model", nargs="?", metavar="MODEL|URL", help="folder, GGUF file, hub id or URL (SmolLM2-135M-Instruct)")
    add_sampling(command)


def add_sampling(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--system", metavar="TEXT", help="instructions that precede the conversation")
    add("--max-tokens", type=int, metavar="N", help="longest answer (default: up to the context length)")
    add("--temperature", type=float, metavar="T", help="0: always the most likely token")
    add("--top-p", type=float, metavar="P", help="keep the most likely tokens of this total probability")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 (auto); not with a URL")
    add("--api-key", metavar="KEY", help="for a server; default: $HEADGATE_API_KEY")
    add_url_ca(add)


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    prompt = options.prompt if options.prompt is not None else typed_prompt()
    if not prompt:
        raise RequestError("no prompt: give it after the model (headgate run MODEL PROMPT) or on standard input")
    with responder(options, environ) as source:
        _, complete = show(source, [*opening(options), {"role": "user", "content": prompt}])
    return 0 if complete else INTERRUPTED


def typed_prompt() -> str:
    if sys.stdin.isatty():
        note("type the prompt, then Ctrl-D (or use: headgate run MODEL PROMPT)")
    return sys.stdin.read().strip()


def chat(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history

    with responder(options, environ) as source:
        note(HELP)
        messages = opening(options)
        for line in typed():
            if line == "/new":
                messages = opening(options)
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text, _ = show(source, asked)
            except (Unanswered, RequestError) as error:
                note(f"headgate: {error}")  # the question is not part of the conversation
                continue
            messages = [*asked, {"role": "assistant", "content": text}]
    return 0


def opening(options: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": options.system}] if options.system else []


def typed() -> Iterator[str]:
    """Yield the lines that a user enters, until the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("")
            continue
        if line:
            yield line


def show(source: Responder, messages: Sequence[Message]) -> tuple[str, bool]:
    """Print an answer as it arrives. Returns its text, and whether it is complete."""
    text, complete = "", True
    try:
        with closing(source.answer(messages)) as pieces:
            for piece in pieces:
                text += piece
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        complete = False
    print()
    if not complete:
        note("(stopped)")
    return text, complete


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def responder(options: argparse.Namespace, environ: Mapping[str, str]) -> Iterator[Responder]:
    names = "max_tokens", "temperature", "top_p", "seed"
    sampling = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.model is not None and options.model.startswith(("http://", "https://")):
        if options.device != "auto":
            raise RequestError("--device is for a model in this process; a server has its own device")
        key = options.api_key or checked_key(environ.get("HEADGATE_API_KEY"), "HEADGATE_API_KEY")
        yield Server(options.model, key, sampling, url_tls(options))
        return
    from headgate.cli.recommended import recommended_sampling
    from headgate.contract.sampling import SamplingParams
    from headgate.logs import set_up
    from headgate.model_store.find import Places, find_model
    from headgate.offline import LLM

    set_up("text", "WARNING", "headgate")
    SamplingParams(**sampling)  # refuses invalid values before the model is read
    note(f"loading {options.model or 'the default model'} ...")
    model = find_model(options.model, Places.of(environ))
    params = SamplingParams(**recommended_sampling(model) | sampling)
    with LLM(model.path, device=options.device, max_running=1) as llm:
        yield Local(llm, params)


class Local:
    """A model in this process. Without a chat template it continues the last message."""

    def __init__(self, llm: LLM, params: Any) -> None:
        self._llm = llm
        self._params = params

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        prompt = messages[-1]["content"] if self._llm.template is None else self._llm.render(messages)
        with closing(self._llm.stream(prompt, self._params)) as pieces:
            yield from pieces


class Server:
    """A server or a router with OpenAI's API. It aborts an answer whose connection is closed."""

    def __init__(self, url: str, key: str | None, sampling: Mapping[str, Any], tls: TlsFiles) -> None:
        from headgate.httpclient import HttpAddress

        if key is not None and not (key.isascii() and key.isprintable()):
            raise RequestError("the API key has characters that cannot be sent")
        self._address = HttpAddress.of(url, tls)
        self._sampling = sampling
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        from http.client import HTTPException

        import msgspec

        from headgate.httpclient import blocking_connection
        from headgate.tls import why

        address = self._address
        body = msgspec.json.encode({"messages": messages, "stream": True, **self._sampling})
        with closing(blocking_connection(address, SILENT_S)) as connection:
            try:
                connection.request("POST", f"{address.path}/v1/chat/completions", body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise Unanswered(f"HTTP {response.status}: {message_of(response.read())}")
                for line in response:
                    if line.startswith(b"data: ") and (piece := piece_of(line[6:])):
                        yield piece
            except (OSError, HTTPException, msgspec.MsgspecError) as error:
                raise Unanswered(f"no answer from {address.host}:{address.port}: {why(error)}") from error


def message_of(body: bytes) -> str:
    import msgspec

    with suppress(msgspec.DecodeError, KeyError, TypeError):
        return str(msgspec.json.decode(body)["error"]["message"])
    return body[:200].decode(errors="replace")


def piece_of(data: bytes) -> str:
    """Return the text in an event of a stream."""
    import msgspec

    if data.strip() == b"[DONE]":
        return ""
    event = msgspec.json.decode(data, type=dict[str, Any])
    if error := event.get("error"):
        raise Unanswered(str(error.get("message", error) if isinstance(error, dict) else error))
    choices = msgspec.convert(event.get("choices", ()), list[dict[str, Any]])
    deltas = (msgspec.convert(choice.get("delta", {}), dict[str, Any]) for choice in choices)
    return "".join(delta.get("content") or "" for delta in deltas)
