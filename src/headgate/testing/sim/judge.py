"""Checks the answers that clients received. Each check returns one string per violation.

The reference is not an engine: each token is compared with the token that a device samples after exactly the tokens
before it, if it reads the right KV under the weights that the answer names. A token that is lost, duplicated, or computed
from another sequence's KV makes that token or the next one wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headgate.api.generate.journal import seed_of
from headgate.testing.sim import vocabulary
from headgate.testing.sim.engine import expected
from headgate.testing.sim.script import PlannedRequest
from headgate.text.detokenizer import token_bytes

# For each circumstance, the codes with which a request may be refused or fail, and the causes of an early end.
REFUSALS = {
    "busy": {"queue_full"},
    "pause": {"paused"},
    "faults": {"no_worker", "worker_lost", "no_engine", "engine_lost", "shutting_down", "duplicate_request_id"},
}
CAUSES = {
    "abort": {"api_abort"},
    "pause": {"pause"},
    "deadline": {"deadline"},
    "faults": {"shutdown", "engine_lost", "preempted"},
}
# Causes with which a router itself ends requests that no worker has.
ROUTER_CAUSES = CAUSES["abort"] | CAUSES["deadline"] | {"pause"}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Events of a run that excuse an answer that is not whole."""

    busy: bool = False  # limits are low enough that requests may be refused
    aborts: frozenset[int] = frozenset()  # the choices whose abort was requested
    pause: bool = False
    faults: bool = False
    updated: bool = False  # the weights were updated
    reschedules: bool = False  # engines return preempted answers
    abandoned: bool = False  # no worker could have continued the answer

    def holds(self, name: str) -> bool:
        return bool(getattr(self, name, False))


@dataclass
class JudgedChoice:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None
    cause: str | None = None
    prompt: list[int] | None = None
    returned_ids: list[int] | None = None  # all ids of a choice that must continue on another worker
    ends: int = 0  # number of finish reasons received
    cut: bool = False  # the router ended it; withheld text is missing, because the router cannot decode tokens


@dataclass
class JudgedAnswer:
    """An answer as its client read it."""

    choices: dict[int, JudgedChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    odd: list[str] = field(default_factory=list)  # violations of the rules for strict clients


def judge(request: PlannedRequest, circumstances: Circumstances) -> list[str]:
    return [f"{request.name}: {complaint}" for complaint in _complaints(request, circumstances)]


def _complaints(request: PlannedRequest, circumstances: Circumstances) -> Iterator[str]:
    reply = request.reply
    if request.behaviour.stalls:
        return  # the client has read nothing
    if reply.broken and not reply.left:
        excused = request.disturbed or (circumstances.faults and not request.routed)
        if not excused:
            yield f"the connection broke: {reply.broken}"
    if not (reply.whole or reply.broken):
        yield "the answer did not end"
        return
    if reply.broken and not reply.streamed:
        return
    if reply.status != 200:
        yield from _check_refusal(request, circumstances)
        return
    if request.giant and not _was_ended_unread(request):
        yield "64: a prompt that does not fit the context was answered"
        return
    answer = read(request)
    yield from _check_content(request, answer, circumstances)
    if not (reply.left or reply.broken):
        yield from _check_ends(request, answer, circumstances)


def _was_ended_unread(request: PlannedRequest) -> bool:
    """Whether the router ended the request before a worker had it, without a token."""
    choices = read(request).choices.values()
    return all(choice.cause in ROUTER_CAUSES and not (choice.text or choice.ids) for choice in choices)


def _check_refusal(request: PlannedRequest, circumstances: Circumstances) -> Iterator[str]:
    if request.giant and request.reply.status in (400, 413):
        return
    try:
        error = request.reply.json()["error"]
    except (ValueError, KeyError, TypeError):
        yield f"refused with {request.reply.status} without an error body: {bytes(request.reply.body)[:200]!r}"
        return
    yield from _check_code(error, request.reply.status, circumstances)


def _check_code(error: dict[str, Any], status: int, circumstances: Circumstances) -> Iterator[str]:
    allowed = {code for reason, codes in REFUSALS.items() if circumstances.holds(reason) for code in codes}
    if error.get("code") not in allowed:
        yield f"refused with {status} {error.get('code')}: {error.get('message')}"


# ------------------------------------------------------------------------------------------------------------- reading


def read(request: PlannedRequest) -> JudgedAnswer:
    answer = JudgedAnswer()
    if not request.reply.streamed:
        body = request.reply.json()
        answer.usage, answer.done = body["usage"], True
        errors = [body["error"]] if "error" in body else []
        parts = body["choices"]
    else:
        events = request.reply.events()
        answer.done = None in events
        errors = [event["error"] for event in events if event is not None and "error" in event]
        parts = [part for event in events if event is not None for part in event.get("choices", ())]
        answer.usage = next((event["usage"] for event in reversed(events) if event and event.get("usage")), None)
    if request.strict:
        errors = _read_strictly(answer, parts, errors, streamed=request.reply.streamed)
    for part in parts:
        message = part.get("message") or part.get("delta")
        _add(answer, part, part["text"] if message is None else message.get("content") or "")
    answer.error = errors[-1] if errors else None
    return answer


def _read_strictly(
    answer: JudgedAnswer, parts: list[Any], errors: list[dict[str, Any]], *, streamed: bool
) -> list[dict[str, Any]]:
    """Translate OpenAI's finish reasons back into ours (guarantee 57). Returns the errors that belong to no choice.

    A choice that was cut short has an error of its own. A stream repeats each of them as an event, a whole answer only
    the first one.
    """
    own = []
    for part in parts:
        finish, cause, error = part.get("finish_reason"), part.get("cause"), part.get("error")
        cut = finish == "length" and cause != "max_tokens"
        if finish in ("abort", "pd_reschedule"):
            answer.odd.append(f"a strict client received the finish reason {finish}")
        if error is not None:
            own.append(error)
        code = error and error.get("code")
        if code not in ((cause, "pd_error") if cut else (None,)):
            answer.odd.append(f"choice {part['index']} ended by {cause}, but its error is {code}")
        if cut:
            part["finish_reason"] = "pd_reschedule" if code == "pd_error" else "abort"
    repeated = own if streamed else own[:1]
    if errors[: len(repeated)] != repeated:
        answer.odd.append(f"the errors of the choices are {own}, but those of the answer {errors}")
    return errors[len(repeated) :]


def _add(answer: JudgedAnswer, part: dict[str, Any], text: str) -> None:
    choice = answer.choices.setdefault(part["index"], JudgedChoice())
    choice.text += text
    choice.ids += part.get("completion_token_ids", ())
    choice.returned_ids = part.get("generated_token_ids", choice.returned_ids)
    for span in part.get("weight_versions", ()):
        choice.versions += [span["version"]] * span["tokens"]
    choice.ends += part.get("finish_reason") is not None
    choice.finish = part.get("finish_reason") or choice.finish
    choice.cut = part.get("cause") in ROUTER_CAUSES and "completion_token_ids" not in part
    choice.cause = part.get("cause") or choice.cause
    choice.prompt = part.get("prompt_token_ids", choice.prompt)


# ------------------------------------------------------------------------------------------------------------- content


def _check_content(request: PlannedRequest, answer: JudgedAnswer, circumstances: Circumstances) -> Iterator[str]:
    yield from answer.odd
    if answer.choices.keys() - set(range(request.n)):
        yield f"received choices {sorted(answer.choices)}, but n was {request.n}"
    for index, choice in answer.choices.items():
        for complaint in _check_choice(request, index, choice, circumstances):
            yield f"choice {index}: {complaint}"


def _was_returned_for_rescheduling(
    request: PlannedRequest, choice: JudgedChoice, circumstances: Circumstances
) -> bool:
    """Whether the choice was returned for rescheduling (guarantee 34) and then ended early, with ids but without text."""
    rescheduled = (
        circumstances.reschedules and choice.finish == "abort" and choice.cause in ("api_abort", "deadline", "pause")
    )
    return rescheduled and not choice.text and not request.stream


def _check_choice(
    request: PlannedRequest, index: int, choice: JudgedChoice, circumstances: Circumstances
) -> Iterator[str]:
    seed = _seed(request)
    if choice.ends > 1:
        yield f"received {choice.ends} finish reasons"
    if choice.prompt is not None and tuple(choice.prompt) != request.prompt:
        yield "prompt_token_ids differ from the prompt"
    if not request.returns_ids:
        if seed is None or circumstances.updated:
            return
        ids = reference(request, seed + index)
        if choice.finish == "abort" or choice.finish is None or choice.finish == "pd_reschedule":
            # The beginning of a stop string is sent if the answer ends before the rest of the stop string.
            stopped = _stop_at(choice.text, request.stops) is not None
            if stopped or not _decode(ids).startswith(choice.text.rstrip("\ufffd")):
                yield f"{choice.text!r} is not a prefix of {_text(request, ids)!r}"
        elif choice.text != _text(request, ids):
            yield f"{choice.text!r} instead of {_text(request, ids)!r}"
        return
    if choice.finish == "pd_reschedule" and choice.returned_ids != choice.ids:
        yield f"returned for rescheduling with {choice.returned_ids}, but its token ids are {choice.ids}"
    if len(choice.versions) != len(choice.ids):
        yield f"{len(choice.ids)} tokens have {len(choice.versions)} weight versions"
        return
    if old := [version for version in choice.versions if version < request.floor_version]:
        newest = request.floor_version
        yield f"answered with weights {sorted(set(old))}, but the fleet had version {newest} before the request was sent"
    if seed is not None:
        yield from _check_tokens(request, choice, seed + index)
    text = _text(request, choice.ids)
    # If the worker of an answer that is not streamed was lost, the router knows its ids, but not its text.
    lost = request.routed and not request.stream and circumstances.faults
    textless = lost and choice.finish == "abort" and choice.cause in ROUTER_CAUSES and not choice.text
    if choice.finish is None or choice.finish == "pd_reschedule" or choice.cut or textless:
        if not text.startswith(choice.text):
            yield f"{choice.text!r} is not a prefix of {text!r}"
    elif choice.text != text and not _was_returned_for_rescheduling(request, choice, circumstances):
        yield f"{choice.text!r} instead of {text!r}"


def _seed(request: PlannedRequest) -> int | None:
    """Return the seed of the first choice; None if it cannot be known."""
    if "seed" in request.body:
        return int(request.body["seed"])
    return seed_of(request.headers["x-request-id"]) if request.routed else None


def _check_tokens(request: PlannedRequest, choice: JudgedChoice, seed: int) -> Iterator[str]:
    known = list(request.prompt)
    for place, (token, version) in enumerate(zip(choice.ids, choice.versions, strict=True)):
        right = expected(known, version, seed)
        if token != right:
            yield f"token {place} is {token} instead of {right} (version {version}, {len(choice.ids)} tokens in all)"
            return
        known.append(token)


def reference(request: PlannedRequest, seed: int) -> list[int]:
    """Return the whole answer under the initial weights."""
    known, ids = list(request.prompt), list[int]()
    while len(ids) < request.body["max_tokens"]:
        ids.append(expected(known, 0, seed))
        known.append(ids[-1])
        if (ids[-1] == vocabulary.EOS and not request.body.get("ignore_eos")) or _stop_at(
            _decode(ids), request.stops
        ) is not None:
            break
    return ids


def _text(request: PlannedRequest, ids: list[int]) -> str:
    text = _decode(ids)
    stop = _stop_at(text, request.stops)
    return text if stop is None else text[:stop]


def _decode(ids: list[int]) -> str:
    pieces = [token_bytes(vocabulary.tokenizer(), token) for token in ids if token != vocabulary.EOS]
    return b"".join(pieces).decode(errors="replace")


def _stop_at(text: str, stops: tuple[str, ...]) -> int | None:
    """Return the position of the stop string that is completed first."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


# ---------------------------------------------------------------------------------------------------------------- ends


def _check_ends(request: PlannedRequest, answer: JudgedAnswer, circumstances: Circumstances) -> Iterator[str]:
    if answer.error is not None:
        yield from _check_code(answer.error, 200, circumstances)
        return
    if not answer.done:
        yield "the stream ended without [DONE]"
    for index in range(request.n):
        choice = answer.choices.get(index)
        if choice is None or choice.finish is None:
            yield f"choice {index} has no finish reason"
        else:
            for complaint in _check_end(request, index, choice, circumstances):
                yield f"choice {index}: {complaint}"
    if answer.usage is not None:
        yield from _check_usage(request, answer)
    elif not request.stream or "stream_options" in request.body:
        yield "the usage is missing"


def _check_end(
    request: PlannedRequest, index: int, choice: JudgedChoice, circumstances: Circumstances
) -> Iterator[str]:
    ids, cause = choice.ids, choice.cause
    match choice.finish:
        case "length":
            if request.returns_ids and len(ids) != request.body["max_tokens"]:
                yield f"finish reason length after {len(ids)} of {request.body['max_tokens']} tokens"
        case "stop" if cause == "eos":
            if request.returns_ids and (ids[-1:] != [vocabulary.EOS] or request.body.get("ignore_eos")):
                yield f"cause eos after {ids[-3:]}"
        case "stop":
            if cause != "stop_string" or (request.returns_ids and _stop_at(_decode(ids), request.stops) is None):
                yield f"stopped by {cause} with {ids[-3:]}"
            if request.returns_ids and _stop_at(_decode(ids[:-1]), request.stops) is not None:
                yield f"has tokens after its stop string: {ids[-3:]}"
        case "abort":
            if cause not in _causes(request, index, circumstances):
                yield f"aborted by {cause}"
        case "pd_reschedule" if circumstances.reschedules and (circumstances.abandoned or not request.routed):
            pass
        case "pd_reschedule":
            yield f"74: returned unfinished after {len(ids)} tokens ({cause}), although a worker could have continued it"
        case other:
            yield f"finished with {other}"
    if request.returns_ids and not request.body.get("ignore_eos") and vocabulary.EOS in ids[:-1]:
        yield "has tokens after the end-of-sequence token"


def _causes(request: PlannedRequest, index: int, circumstances: Circumstances) -> set[str]:
    allowed = {cause for reason, causes in CAUSES.items() if circumstances.holds(reason) for cause in causes}
    allowed |= CAUSES["abort"] if index in circumstances.aborts else set()
    return allowed | (CAUSES["deadline"] if "deadline_ms" in request.body else set())


def _check_usage(request: PlannedRequest, answer: JudgedAnswer) -> Iterator[str]:
    usage = answer.usage or {}
    made = sum(len(choice.ids) for choice in answer.choices.values())
    # A router learns the length of the prompt with the first token of the answer.
    unread = request.routed and not (usage["prompt_tokens"] or usage["completion_tokens"])
    unread = unread and any(choice.cause in ROUTER_CAUSES for choice in answer.choices.values())
    if usage["prompt_tokens"] != len(request.prompt) and not unread:
        yield f"{usage['prompt_tokens']} prompt tokens instead of {len(request.prompt)}"
    if request.returns_ids and usage["completion_tokens"] != made:
        yield f"the usage counts {usage['completion_tokens']} tokens, but {made} were received"


def judge_abort(request: PlannedRequest, tokens: int, choice: int | None = None) -> list[str]:
    """Check a request, or a choice of it, that an abort call reported as aborted after `tokens` tokens."""
    if request.reply.broken or not request.reply.whole or request.reply.status != 200:
        return []
    answer = read(request)
    if answer.error is not None:
        return []
    choices = answer.choices if choice is None else {choice: answer.choices.get(choice, JudgedChoice())}
    causes = [each.cause for each in choices.values()]
    if not {"api_abort", "pause"} & set(causes):  # an abort and a pause may coincide; the first one counts
        return [f"{request.name}: an abort call reported it as aborted, but it ended with {causes}"]
    made = sum(len(each.ids) for each in choices.values())
    if request.returns_ids and made != tokens:
        return [
            f"{request.name}: an abort call reported it as aborted after {tokens} tokens, but {made} were received"
        ]
    return []


def has_tokens(request: PlannedRequest) -> bool:
    """Whether the client received a whole answer with tokens."""
    reply = request.reply
    if reply.broken or not reply.whole or reply.status != 200:
        return False
    return any(choice.ids for choice in read(request).choices.values())


def code_of(request: PlannedRequest) -> str | None:
    """Return the error code of a refused or cut request; None if it was neither."""
    if request.reply.status != 200:
        return str(request.reply.json()["error"]["code"])
    answer = read(request)
    return None if answer.error is None else str(answer.error.get("code"))


def tally(requests: list[PlannedRequest]) -> Counter[str]:
    """Count requests and choices by their kind of end."""
    ends: Counter[str] = Counter()
    for request in requests:
        reply = request.reply
        if reply.left:
            ends["left"] += 1
        elif reply.broken or not reply.whole:
            ends["broken"] += 1
        elif reply.status != 200:
            ends[f"{reply.status} {reply.json()['error']['code']}"] += 1
        else:
            answer = read(request)
            if answer.error is not None:
                ends[f"cut {answer.error.get('code')}"] += 1
            for choice in answer.choices.values():
                ends[str(choice.cause)] += 1
    return ends
