"""OpenVINO GenAI's continuous batching. The model is exported once into a folder next to the checkpoint."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from serve import serve


def exported(model: Path, dtype: str) -> Path:
    folder = model.with_name(f"{model.name}-openvino-{dtype}")
    if not (folder / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM

        OVModelForCausalLM.from_pretrained(model, export=True, load_in_8bit=False, compile=False).save_pretrained(
            folder
        )
    return folder


def main(model: str, dtype: str, threads: str) -> None:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    folder = exported(Path(model), dtype)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = 32
    scheduler.enable_prefix_caching = True
    hint = {"bfloat16": ov.Type.bf16, "float32": ov.Type.f32}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": int(threads), "KV_CACHE_PRECISION": hint}
    tokenizer = genai.Tokenizer(folder) if (folder / "openvino_tokenizer.xml").exists() else None
    arguments = (folder, tokenizer) if tokenizer else (folder,)
    pipeline = genai.ContinuousBatchingPipeline(*arguments, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return sum(len(result.m_generation_ids[0]) for result in results)

    serve({"version": version("openvino-genai")}, generate)


if __name__ == "__main__":
    main(*sys.argv[1:])
