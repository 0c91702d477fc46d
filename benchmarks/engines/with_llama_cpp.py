"""Expects `MODEL/model.gguf` (`benchmarks/experts.py` writes it) and `llama-cpp-python`."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp
from serve import serve


def main(model: str, dtype: str, threads: str) -> None:
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    settings.use_mmap = False
    path = str(Path(model) / "model.gguf").encode()
    network = llama_cpp.llama_model_load_from_file(path, settings)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_seq_max = 8192, 2048, 8
    options.n_threads = options.n_threads_batch = int(threads)
    context = llama_cpp.llama_init_from_model(network, options)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(network))
    batch = llama_cpp.llama_batch_init(2048, 0, 8)

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

    def best(logits: ctypes._Pointer[ctypes.c_float]) -> int:
        values = memoryview(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * words)).contents).cast("B").cast("f")
        return max(range(words), key=values.__getitem__)

    def generate(prompts: list[list[int]], max_tokens: int) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = step([(i, 0, prompt) for i, prompt in enumerate(prompts)])
        for done in range(max_tokens - 1):
            tokens = step([(i, len(prompts[i]) + done, [token]) for i, token in enumerate(tokens)])
        return max_tokens * len(prompts)

    serve({"version": llama_cpp.__version__}, generate)


main(*sys.argv[1:])
