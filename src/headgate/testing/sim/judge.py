"""What clients may get: the oracles of a run. Every one returns sentences about what is wrong.

The reference is not an engine: each token is checked against what a device that read the right KV, under the weights that
the answer names, would have said after exactly the tokens before it. So a token that is lost, doubled, or made from
another sequence's KV makes that token or the next one wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headgate.api.generate.journal import seed_of
from headgate.testing.sim import words
from headgate.testing.sim.engine import expected
from headgate.testing.sim.script import PlannedRequest
from headgate.text.detokenizer import token_bytes

# By what has happened in a run: the codes with which a request may be refused or end, and the causes of an early end.
REFUSALS = {
    "busy": {"queue_full"},
    "pause": {"paused"},
    "trouble": {"no_worker", "worker_lost", "no_engine", "engine_lost", "shutting_down", "duplicate_request_id"},
}
CAUSES = {
    "abort": {"api_abort"},
    "pause": {"pause"},
    "deadline": {"deadline"},
    "trouble": {"shutdown", "engine_lost", "preempted"},
}
UNHEARD = CAUSES["abort"] | CAUSES["deadline"] | {"pause"}  # with which the router ends what no worker has


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What has happened in a run that excuses an answer that is not whole."""

    busy: bool = False  # limits are so low that requests may be refused
    abort: bool = False
    pause: bool = False
    trouble: bool = False
    updated: bool = False  # there were several weights
    reschedules: bool = False

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
    given_back: list[int] | None = None  # all ids, of one that must go on elsewhere
    ends: int = 0  # how often that was told
    cut: bool = False  # by the router, who knows no words: what was held back is not told


@dataclass
class JudgedAnswer:
    """An answer as its client understood it."""

    choices: dict[int, JudgedChoice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    odd: list[str] = field(default_factory=list)  # what a strict client must not see


def judge(ask: PlannedRequest, seen: Circumstances) -> list[str]:
    return [f"{ask.name}: {complaint}" for complaint in _complaints(ask, seen)]


def _complaints(ask: PlannedRequest, seen: Circumstances) -> Iterator[str]:
    reply = ask.reply
    if ask.manners.stalls:
        return  # it has read nothing that could be judged
    if reply.broken and not reply.left:
        excused = ask.disturbed or (seen.trouble and not ask.routed)
        if not excused:
            yield f"its connection broke: {reply.broken}"
    if not (reply.whole or reply.broken):
        yield "it has had no end"
        return
    if reply.broken and not reply.streamed:
        return
    if reply.status != 200:
        yield from _refused(ask, seen)
        return
    if ask.giant and not _was_unread(ask):
        yield "64: a prompt that fits no context was answered"
        return
    told = read(ask)
    yield from _content(ask, told, seen)
    if not (reply.left or reply.broken):
        yield from _ends(ask, told, seen)


def _was_unread(ask: PlannedRequest) -> bool:
    """Whether it ended before a worker had it, without a token."""
    choices = read(ask).choices.values()
    return all(choice.cause in UNHEARD and not (choice.text or choice.ids) for choice in choices)


def _refused(ask: PlannedRequest, seen: Circumstances) -> Iterator[str]:
    if ask.giant and ask.reply.status in (400, 413):
        return
    try:
        error = ask.reply.json()["error"]
    except (ValueError, KeyError, TypeError):
        yield f"refused with {ask.reply.status} and no error: {bytes(ask.reply.body)[:200]!r}"
        return
    yield from _excused(error, ask.reply.status, seen)


def _excused(error: dict[str, Any], status: int, seen: Circumstances) -> Iterator[str]:
    allowed = {code for reason, codes in REFUSALS.items() if seen.holds(reason) for code in codes}
    if error.get("code") not in allowed:
        yield f"refused with {status} {error.get('code')}: {error.get('message')}"


# ------------------------------------------------------------------------------------------------------------- reading


def read(ask: PlannedRequest) -> JudgedAnswer:
    told = JudgedAnswer()
    if not ask.reply.streamed:
        body = ask.reply.json()
        told.usage, told.done = body["usage"], True
        errors = [body["error"]] if "error" in body else []
        parts = body["choices"]
    else:
        events = ask.reply.events()
        told.done = None in events
        errors = [event["error"] for event in events if event is not None and "error" in event]
        parts = [part for event in events if event is not None for part in event.get("choices", ())]
        told.usage = next((event["usage"] for event in reversed(events) if event and event.get("usage")), None)
    if ask.strict:
        errors = _read_strictly(told, parts, errors)
    for part in parts:
        message = part.get("message") or part.get("delta")
        _add(told, part, part["text"] if message is None else message.get("content") or "")
    told.error = errors[-1] if errors else None
    return told


def _read_strictly(told: JudgedAnswer, parts: list[Any], errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put our finish reasons in the place of OpenAI's (57); the errors that remain are those that no choice explains."""
    said = {error.get("code") for error in errors}
    explained = set()
    for part in parts:
        finish, cause = part.get("finish_reason"), part.get("cause")
        if finish in ("abort", "pd_reschedule"):
            told.odd.append(f"a strict client was told {finish}")
        elif finish == "length" and cause != "max_tokens":
            part["finish_reason"] = "abort" if cause in said else "pd_reschedule"
            explained |= {cause if cause in said else "pd_error"}
            if cause not in said and "pd_error" not in said:
                told.odd.append(f"choice {part['index']} was cut short by {cause}, and no error says so")
    return [error for error in errors if error.get("code") not in explained]


def _add(told: JudgedAnswer, part: dict[str, Any], text: str) -> None:
    choice = told.choices.setdefault(part["index"], JudgedChoice())
    choice.text += text
    choice.ids += part.get("completion_token_ids", ())
    choice.given_back = part.get("generated_token_ids", choice.given_back)
    for span in part.get("weight_versions", ()):
        choice.versions += [span["version"]] * span["tokens"]
    choice.ends += part.get("finish_reason") is not None
    choice.finish = part.get("finish_reason") or choice.finish
    choice.cut = part.get("cause") in UNHEARD and "completion_token_ids" not in part
    choice.cause = part.get("cause") or choice.cause
    choice.prompt = part.get("prompt_token_ids", choice.prompt)


# ------------------------------------------------------------------------------------------------------------- content


def _content(ask: PlannedRequest, told: JudgedAnswer, seen: Circumstances) -> Iterator[str]:
    yield from told.odd
    if told.choices.keys() - set(range(ask.n)):
        yield f"choices {sorted(told.choices)} of {ask.n}"
    for index, choice in told.choices.items():
        for complaint in _choice(ask, index, choice, seen):
            yield f"choice {index}: {complaint}"


def _was_given_back(ask: PlannedRequest, choice: JudgedChoice, seen: Circumstances) -> bool:
    """Such a choice has ids and no text (34), also if it is aborted, paused or overdue before another worker has it."""
    given_back = seen.reschedules and choice.finish == "abort" and choice.cause in ("api_abort", "deadline", "pause")
    return given_back and not choice.text and not ask.stream


def _choice(ask: PlannedRequest, index: int, choice: JudgedChoice, seen: Circumstances) -> Iterator[str]:
    seed = _seed(ask)
    if choice.ends > 1:
        yield f"its end was told {choice.ends} times"
    if choice.prompt is not None and tuple(choice.prompt) != ask.prompt:
        yield "the prompt is another one"
    if not ask.tells_ids:
        if seed is None or seen.updated:
            return
        ids = reference(ask, seed + index)
        if choice.finish == "abort" or choice.finish is None or choice.finish == "pd_reschedule":
            # The beginning of a stop string is told if the answer ends before the rest of it has come.
            stopped = _stop_at(choice.text, ask.stops) is not None
            if stopped or not _decode(ids).startswith(choice.text.rstrip("\ufffd")):
                yield f"{choice.text!r} is no beginning of {_text(ask, ids)!r}"
        elif choice.text != _text(ask, ids):
            yield f"{choice.text!r} instead of {_text(ask, ids)!r}"
        return
    if choice.finish == "pd_reschedule" and choice.given_back != choice.ids:
        yield f"{choice.given_back} are given back, and its ids are {choice.ids}"
    if len(choice.versions) != len(choice.ids):
        yield f"{len(choice.ids)} tokens have {len(choice.versions)} weight versions"
        return
    if old := [version for version in choice.versions if version < ask.floor]:
        yield f"it was answered by weights {sorted(set(old))}, and the fleet had {ask.floor} before it was asked"
    if seed is not None:
        yield from _tokens(ask, choice, seed + index)
    whole = _text(ask, choice.ids)
    # The router knows the ids of a whole answer whose worker was lost, and not its text.
    lost = ask.routed and not ask.stream and seen.trouble
    wordless = lost and choice.finish == "abort" and choice.cause in UNHEARD and not choice.text
    if choice.finish is None or choice.finish == "pd_reschedule" or choice.cut or wordless:
        if not whole.startswith(choice.text):
            yield f"{choice.text!r} is no beginning of {whole!r}"
    elif choice.text != whole and not _was_given_back(ask, choice, seen):
        yield f"{choice.text!r} instead of {whole!r}"


def _seed(ask: PlannedRequest) -> int | None:
    """Of its first choice; None if nobody can know."""
    if "seed" in ask.body:
        return int(ask.body["seed"])
    return seed_of(ask.headers["x-request-id"]) if ask.routed else None


def _tokens(ask: PlannedRequest, choice: JudgedChoice, seed: int) -> Iterator[str]:
    known = list(ask.prompt)
    for place, (token, version) in enumerate(zip(choice.ids, choice.versions, strict=True)):
        right = expected(known, version, seed)
        if token != right:
            yield f"token {place} is {token} and not {right} (version {version}, {len(choice.ids)} tokens in all)"
            return
        known.append(token)


def reference(ask: PlannedRequest, seed: int) -> list[int]:
    """The whole answer of weights that never changed."""
    known, ids = list(ask.prompt), list[int]()
    while len(ids) < ask.body["max_tokens"]:
        ids.append(expected(known, 0, seed))
        known.append(ids[-1])
        if (ids[-1] == words.EOS and not ask.body.get("ignore_eos")) or _stop_at(_decode(ids), ask.stops) is not None:
            break
    return ids


def _text(ask: PlannedRequest, ids: list[int]) -> str:
    text = _decode(ids)
    stop = _stop_at(text, ask.stops)
    return text if stop is None else text[:stop]


def _decode(ids: list[int]) -> str:
    spoken = [token_bytes(words.tokenizer(), token) for token in ids if token != words.EOS]
    return b"".join(spoken).decode(errors="replace")


def _stop_at(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string begins that was complete first."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


# ---------------------------------------------------------------------------------------------------------------- ends


def _ends(ask: PlannedRequest, told: JudgedAnswer, seen: Circumstances) -> Iterator[str]:
    if told.error is not None:
        yield from _excused(told.error, 200, seen)
        return
    if not told.done:
        yield "its stream ended without [DONE]"
    for index in range(ask.n):
        choice = told.choices.get(index)
        if choice is None or choice.finish is None:
            yield f"choice {index} never ended"
        else:
            for complaint in _end(ask, choice, seen):
                yield f"choice {index}: {complaint}"
    if told.usage is not None:
        yield from _usage(ask, told)
    elif not ask.stream or "stream_options" in ask.body:
        yield "there is no usage"


def _end(ask: PlannedRequest, choice: JudgedChoice, seen: Circumstances) -> Iterator[str]:
    ids, cause = choice.ids, choice.cause
    match choice.finish:
        case "length":
            if ask.tells_ids and len(ids) != ask.body["max_tokens"]:
                yield f"length after {len(ids)} of {ask.body['max_tokens']} tokens"
        case "stop" if cause == "eos":
            if ask.tells_ids and (ids[-1:] != [words.EOS] or ask.body.get("ignore_eos")):
                yield f"eos after {ids[-3:]}"
        case "stop":
            if cause != "stop_string" or (ask.tells_ids and _stop_at(_decode(ids), ask.stops) is None):
                yield f"stopped by {cause} with {ids[-3:]}"
            if ask.tells_ids and _stop_at(_decode(ids[:-1]), ask.stops) is not None:
                yield f"has tokens after its stop string: {ids[-3:]}"
        case "abort":
            if cause not in _causes(ask, seen):
                yield f"aborted by {cause}"
        case "pd_reschedule" if seen.reschedules and (seen.trouble or not ask.routed):  # 74
            pass
        case other:
            yield f"finished with {other}"
    if ask.tells_ids and not ask.body.get("ignore_eos") and words.EOS in ids[:-1]:
        yield "went on after its end"


def _causes(ask: PlannedRequest, seen: Circumstances) -> set[str]:
    allowed = {cause for reason, causes in CAUSES.items() if seen.holds(reason) for cause in causes}
    return allowed | (CAUSES["deadline"] if "deadline_ms" in ask.body else set())


def _usage(ask: PlannedRequest, told: JudgedAnswer) -> Iterator[str]:
    usage = told.usage or {}
    made = sum(len(choice.ids) for choice in told.choices.values())
    # A router learns the length of a prompt with the first token of an answer.
    unread = ask.routed and not (usage["prompt_tokens"] or usage["completion_tokens"])
    unread = unread and any(choice.cause in UNHEARD for choice in told.choices.values())
    if usage["prompt_tokens"] != len(ask.prompt) and not unread:
        yield f"{usage['prompt_tokens']} prompt tokens instead of {len(ask.prompt)}"
    if ask.tells_ids and usage["completion_tokens"] != made:
        yield f"{usage['completion_tokens']} tokens in its usage, and {made} told"


def judge_abort(ask: PlannedRequest, tokens: int) -> list[str]:
    """Whether it was aborted, as the caller of an abort was told; and after how many tokens."""
    if ask.reply.broken or not ask.reply.whole or ask.reply.status != 200:
        return []
    told = read(ask)
    if told.error is not None:
        return []
    causes = [choice.cause for choice in told.choices.values()]
    if not {"api_abort", "pause"} & set(causes):  # the one that was first, where an abort and a pause meet
        return [f"{ask.name}: it was said to be aborted, and ended with {causes}"]
    made = sum(len(choice.ids) for choice in told.choices.values())
    if ask.tells_ids and made != tokens:
        return [f"{ask.name}: it was said to be aborted after {tokens} tokens, and told {made}"]
    return []


def code_of(ask: PlannedRequest) -> str | None:
    """The code with which it was refused or cut; None if it was neither."""
    if ask.reply.status != 200:
        return str(ask.reply.json()["error"]["code"])
    told = read(ask)
    return None if told.error is None else str(told.error.get("code"))


def tally(asks: list[PlannedRequest]) -> Counter[str]:
    """How requests ended."""
    ends: Counter[str] = Counter()
    for ask in asks:
        reply = ask.reply
        if reply.left:
            ends["left"] += 1
        elif reply.broken or not reply.whole:
            ends["broken"] += 1
        elif reply.status != 200:
            ends[f"{reply.status} {reply.json()['error']['code']}"] += 1
        else:
            told = read(ask)
            if told.error is not None:
                ends[f"cut {told.error.get('code')}"] += 1
            for choice in told.choices.values():
                ends[str(choice.cause)] += 1
    return ends
