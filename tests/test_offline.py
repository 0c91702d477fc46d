from __future__ import annotations

import math
import os
import signal
import threading
from itertools import zip_longest
from pathlib import Path

import pytest

from headgate import LLM, SamplingParams
from headgate.errors import BrokenCheckpoint, EngineDead, NotAModel, OutOfMemory, RequestError
from headgate.testing.tiny import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, max_running=8) as llm:
        yield llm
        llm.engine.scheduler.check()
        assert llm.engine.loop.idle


def test_answers_are_in_the_order_of_the_prompts(llm):
    asked = ["One", "Two", [1, 2, 3]]
    together = llm.generate(asked, GREEDY, progress=False)
    assert [answer.token_ids for answer in together] == [
        llm.generate(prompt, GREEDY, progress=False)[0].token_ids for prompt in asked
    ]
    assert [answer.prompt_token_ids for answer in together] == [
        *map(tuple, map(llm.tokenizer.encode, asked[:2])),
        (1, 2, 3),
    ]


def test_an_answer_has_its_finish_reason_and_timings(llm):
    (answer,) = llm.generate("Hello", GREEDY, progress=False)
    assert (answer.finish_reason, answer.cause, len(answer.token_ids)) == ("length", "max_tokens", 12)
    timings = answer.timings
    assert timings.arrived_s <= timings.started_s < timings.first_token_s < timings.ended_s
    assert answer.weight_versions == [(0, 12)]
    assert answer.text == llm.tokenizer.decode(answer.token_ids)


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(answer.token_ids) for answer in llm.generate(["a", "b"], params, progress=False)] == [1, 5]
    with pytest.raises(RequestError, match="2 prompts but 1 sampling parameters"):
        llm.generate(["a", "b"], params[:1])


def test_a_stream_is_the_text_in_pieces(llm):
    (whole,) = llm.generate("Hello", GREEDY, progress=False)
    assert "".join(llm.stream("Hello", GREEDY)) == whole.text


def test_a_closed_stream_releases_everything(llm):
    stream = llm.stream("Hello", SamplingParams(max_tokens=300, ignore_eos=True))
    next(stream)
    assert llm.engine.scheduler.sequences
    stream.close()
    assert llm.engine.loop.idle


def test_two_streams_can_be_read_alternately(llm):
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    whole = [llm.generate(prompt, params, progress=False)[0].text for prompt in ("a", "b")]
    pieces = zip_longest(llm.stream("a", params), llm.stream("b", params), fillvalue="")
    assert ["".join(each) for each in zip(*pieces, strict=True)] == whole


def test_a_stream_has_its_whole_text_even_if_another_call_ran_the_engine(llm):
    (whole,) = llm.generate("a", GREEDY, progress=False)
    stream = llm.stream("a", GREEDY)
    first = next(stream)
    llm.generate("b", SamplingParams(max_tokens=40, ignore_eos=True), progress=False)
    assert first + "".join(stream) == whole.text


def test_a_stop_string_ends_the_answer_before_it(llm):
    (whole,) = llm.generate("Hello", GREEDY, progress=False)
    stop = whole.text[3:5]
    (cut,) = llm.generate("Hello", GREEDY, stop=[stop], progress=False)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.cause) == ("stop", "stop_string")
    assert llm.engine.loop.idle


def test_a_partial_answer_continues_as_if_it_had_not_been_interrupted(llm):
    params = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True) for i in range(3)]
    whole = llm.generate(["a", "b", "c"], params, progress=False)
    begun = [whole[0].token_ids[:7], [], whole[2].token_ids]
    resumed = llm.generate(["a", "b", "c"], params, generated=begun, progress=False)
    assert [answer.token_ids for answer in resumed] == [answer.token_ids for answer in whole]
    assert [answer.text for answer in resumed] == [answer.text for answer in whole]
    assert [sum(made for _, made in answer.weight_versions) for answer in resumed] == [13, 20, 0]


def test_a_stop_string_that_begins_in_a_partial_answer_is_found(llm):
    (whole,) = llm.generate("Hello", GREEDY, progress=False)
    stop = whole.text[3:5]
    (cut,) = llm.generate("Hello", GREEDY, stop=[stop], progress=False)
    for split in range(1, len(cut.token_ids) + 1):
        begun = [cut.token_ids[:split]]
        (resumed,) = llm.generate("Hello", GREEDY, stop=[stop], generated=begun, progress=False)
        assert (resumed.text, resumed.token_ids, resumed.cause) == (cut.text, cut.token_ids, "stop_string")
    assert llm.engine.loop.idle


def test_generated_needs_one_entry_per_prompt(llm):
    with pytest.raises(RequestError, match="2 prompts but 1 entries in generated"):
        llm.generate(["a", "b"], generated=[[1]], progress=False)


def test_log_probabilities_are_returned_for_requests_that_ask_for_them(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (answer,) = llm.generate([[5, 6, 7, 8]], params, progress=False)
    assert len(answer.logprobs) == 4
    for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert logprobs.top_ids[0] == token and logprobs.top[0] == logprobs.token and len(logprobs.top) == 3
    assert answer.prompt_logprobs[0] is None
    assert all(math.isfinite(each.token) and len(each.top) == 2 for each in answer.prompt_logprobs[1:])
    assert len(answer.prompt_logprobs) == 4


def test_chat_uses_the_models_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = llm.tokenizer.decode(llm.render(messages), skip_special=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.chat(messages, GREEDY).text == llm.generate([llm.render(messages)], GREEDY, progress=False)[0].text


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1] * 600, GREEDY, "prompt has 600 tokens; this engine accepts 511, to leave room for an answer"),
        (
            [1] * 8,
            SamplingParams(max_tokens=600),
            "prompt has 8 tokens and max_tokens is 600; their sum may be at most 512",
        ),
        ([1.5], GREEDY, "a prompt is text or a list of token ids"),
        ([999], GREEDY, "token id 999 is outside the vocabulary of 260"),
    ],
)
def test_invalid_requests_are_refused_and_the_engine_keeps_running(llm, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], params, progress=False)
    assert llm.engine.loop.idle
    assert llm.generate("Hello", GREEDY, progress=False)[0].token_ids


def test_one_bad_prompt_aborts_the_whole_call_and_releases_everything(llm):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[1], [999]], SamplingParams(max_tokens=200, ignore_eos=True), progress=False)
    assert llm.engine.loop.idle


def test_ctrl_c_ends_the_call_and_releases_everything(llm):
    over = threading.Event()

    def press() -> None:
        while llm.engine.loop.idle:  # until then SIGINT may be ignored, if a shell runs the tests in the background
            if over.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    long = SamplingParams(max_tokens=500, ignore_eos=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello"] * 1000, long, progress=False)
    finally:
        over.set()
        pressing.join(60)
    assert llm.engine.loop.idle
    llm.engine.scheduler.check()
    assert llm.generate("Hello", GREEDY, progress=False)[0].token_ids


def test_a_failing_step_raises_instead_of_hanging(folder):
    with LLM(folder, max_running=2) as llm:
        llm.engine.executor._runner.run = lambda _: 1 / 0
        with pytest.raises(ZeroDivisionError):
            llm.generate("Hello", GREEDY, progress=False)
        with pytest.raises(EngineDead, match="the engine is closed"):
            llm.generate("Hello", GREEDY, progress=False)


def test_a_closed_llm_raises(folder):
    llm = LLM(folder, max_running=2)
    llm.close()
    with pytest.raises(EngineDead, match="the engine is closed"):
        llm.generate("Hello", GREEDY, progress=False)


def test_a_prompt_of_one_token_has_no_logprob(llm):
    (answer,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    assert answer.prompt_logprobs == [None]


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path):
    with LLM(tiny_model(tmp_path, tokenizer=False), max_running=2) as llm:
        (answer,) = llm.generate([[1, 2, 3]], GREEDY, progress=False)
        assert len(answer.token_ids) == 12 and answer.text == ""
        with pytest.raises(RequestError, match="no tokenizer; give prompts as token ids"):
            llm.generate("Hello", GREEDY)
        with pytest.raises(RequestError, match="stop strings need one"):
            llm.generate([[1]], GREEDY, stop=["x"])
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "Hi"}])


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(NotAModel, match="holds no model"):
        LLM(tmp_path)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    weights = tiny_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BrokenCheckpoint, match="is cut short"):
        LLM(tmp_path)


def test_a_context_that_does_not_fit_is_refused_with_what_to_change(folder):
    with pytest.raises(OutOfMemory, match=r"a context of 512 tokens needs .* lower max_context"):
        LLM(folder, max_context=512, kv_blocks=2)


def test_more_blocks_than_there_is_memory_are_refused(folder):
    with pytest.raises(OutOfMemory, match=r"1000000000000 KV blocks need .* lower kv_blocks"):
        LLM(folder, kv_blocks=10**12)


def test_a_context_longer_than_the_models_is_refused(folder):
    with pytest.raises(RequestError, match="max_context is 513; this model takes at most 512 tokens"):
        LLM(folder, max_context=513)


def test_the_default_context_is_reduced_to_what_fits(folder):
    with LLM(folder, kv_blocks=2, max_running=2) as llm:
        assert llm.engine.info.max_context == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"block_size": 7}, "block_size must be"),
        ({"backend": "bogus"}, "backend must be one of"),
        ({"max_running": 0}, "at least 1"),
    ],
)
def test_options_are_checked_by_name(folder, options, message):
    with pytest.raises(RequestError, match=message):
        LLM(folder, **options)
