"""Expects a GGUF file, or a folder with `model.gguf` (`benchmarks/experts.py` writes it), and `llama-cpp-python`."""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np
from serve import serve

# Room for 32 requests of up to 640 tokens. The cache is one, so that a single request may also be longer.
CONTEXT, SEQUENCES, BATCH = 20480, 32, 2048


def main(model: str, dtype: str, threads: str) -> None:
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    settings.use_mmap = False
    path = Path(model) if Path(model).is_file() else Path(model) / "model.gguf"
    network = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_seq_max = CONTEXT, BATCH, SEQUENCES
    options.kv_unified = True
    options.n_threads = options.n_threads_batch = int(threads)
    context = llama_cpp.llama_init_from_model(network, options)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(network))
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def step(chunks: list[tuple[int, int, list[int]]]) -> list[int]:
        """Compute tokens of sequences, given as (sequence, first position, tokens); the best next token of each."""
        batch.n_tokens, ends = 0, []
        for sequence, first, tokens in chunks:
            for i, token in enumerate(tokens):
                place = batch.n_tokens
                batch.token[place], batch.pos[place] = token, first + i
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                batch.logits[place] = i + 1 == len(tokens)
                batch.n_tokens += 1
            ends.append(batch.n_tokens - 1)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        return [best(llama_cpp.llama_get_logits_ith(context, end)) for end in ends]

    def best(logits: object) -> int:
        return int(np.ctypeslib.as_array(logits, (words,)).argmax())

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens: list[int] = []
        for group in groups(prompts):
            tokens += step([(i, 0, prompts[i]) for i in group])
        for done in range(max_tokens - 1):
            tokens = step([(i, len(prompts[i]) + done, [token]) for i, token in enumerate(tokens)])
        return max_tokens * len(prompts)

    def groups(prompts: list[list[int]]) -> list[list[int]]:
        """The numbers of prompts that fit in one batch."""
        found: list[list[int]] = [[]]
        for i, prompt in enumerate(prompts):
            if sum(len(prompts[j]) for j in found[-1]) + len(prompt) > BATCH:
                found.append([])
            found[-1].append(i)
        return found

    serve({"version": llama_cpp.__version__}, generate)


main(*sys.argv[1:])
