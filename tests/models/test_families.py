"""Every family in an engine: its tokens are those of `transformers`, however they are scheduled, and after an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate import LLM, SamplingParams
from headgate.device.build import kv_name
from headgate.models import read_spec
from headgate.protocol.command import FileSource, Pause, Resume, UpdateWeights
from tests.models.families import OWN, write_family
from tests.models.reference import reference_greedy
from tests.resume import resume
from tests.test_equality import CROWDED, answers, prompts

COUNT = 16
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0],
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=OWN)
def folders(request, tmp_path_factory) -> tuple[Path, Path]:
    """Two checkpoints of a family."""
    old, new = (write_family(tmp_path_factory.mktemp("model"), request.param, seed=seed) for seed in (0, 1))
    return old, new


def test_60_tokens_are_those_of_transformers_preempted_cached_resumed_and_updated(folders):
    old, new = folders
    asked = prompts(8)
    expected = [reference_greedy(old, prompt, COUNT) for prompt in asked]
    with LLM(old, dtype="float32", **CROWDED) as llm:
        assert answers(llm, asked, [GREEDY] * 8) == expected, "in chunks, preempted"
        assert answers(llm, asked, [GREEDY] * 8) == expected, "prompts cached"
        scheduler = llm.engine.scheduler
        # Attention windows give blocks back, so models with windows are not crowded here.
        assert (scheduler.counters.preemptions > 0) != scheduler.pool.groups.windowed
        assert scheduler.counters.cached_tokens > 0
        for split in range(1, COUNT):
            answer = expected[split % 8]
            assert resume(llm, asked[split % 8], GREEDY, answer[:split]) == answer[split:], f"resumed after {split}"
        llm.call(Pause("keep"))
        llm.call(UpdateWeights(FileSource(str(new))))
        llm.call(Resume())
        renewed = [reference_greedy(new, prompt, COUNT) for prompt in asked[:2]]
        assert answers(llm, asked[:2], [GREEDY] * 2) == renewed != expected[:2], "after an update"


@pytest.mark.parametrize(("max_context", "length"), [(64, 40), (512, 70)])
def test_long_rotary_factors_are_used_if_the_served_context_exceeds_the_original_one(tmp_path, max_context, length):
    """`transformers` decides by the length of a sequence; it agrees if all sequences are on one side."""
    folder = write_family(tmp_path, "phi3", rope_parameters=LONG, original_max_position_embeddings=64)
    asked = [(prompt * length)[:length] for prompt in prompts(3, seed=2)]
    with LLM(folder, dtype="float32", max_context=max_context, max_running=4) as llm:
        expected = [reference_greedy(folder, prompt, COUNT) for prompt in asked]
        assert answers(llm, asked, [GREEDY] * 3) == expected


def test_kv_with_short_and_with_long_rotary_factors_is_not_exchanged(tmp_path):
    folder = write_family(tmp_path, "phi3", rope_parameters=LONG, original_max_position_embeddings=64)
    spec = read_spec(folder)
    assert kv_name(folder, spec) == kv_name(folder, spec.within(65)) != kv_name(folder, spec.within(64))
    assert read_spec(write_family(tmp_path / "other", "phi3")).has_long_angles is False
