"""`headgate bench ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.cli.exits import FAILED
from headgate.cli.tls import add_url_ca, url_tls

if TYPE_CHECKING:
    from headgate.bench.dataset import Dataset
    from headgate.bench.load import Pace


def result_file(text: str) -> Path:
    """Check the path of an output file, so that a missing folder is reported before the benchmark runs."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def add_bench_serve(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench serve [URL] [options]"
    command.set_defaults(run=bench_serve)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="a server (default: %(default)s)")

    load = command.add_argument_group("load")
    add, pace = load.add_argument, load.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=float, metavar="PER_S", help="open loop: Poisson arrivals at this many per second"
    )
    pace.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N clients in parallel (default: 8)")
    add("--requests", type=int, metavar="N", help="total requests (default: 100, or the whole trace)")
    add("--dataset", default="random", help="random, shared-prefix, multi-turn, trace:FILE (random)")
    add("--seed", type=int, default=0, help="seed of arrival times and prompts (default: 0)")
    add("--timeout", type=float, default=600.0, metavar="S", help="timeout per request (default: 600)")

    add = command.add_argument_group("requests").add_argument
    add("--api", choices=("chat", "completions"), default="chat", help="endpoint (default: chat)")
    add("--model", help="model name (default: the first one listed)")
    add("--prompt-words", type=int, default=64, metavar="N", help="words per prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens per answer (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="generate exactly --max-tokens (if the server can)")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")
    add_url_ca(add)

    add = command.add_argument_group("results").add_argument
    add("--json", type=result_file, metavar="FILE", help="write the summary and every request as JSON")
    add("--plot", type=result_file, metavar="FILE", help="write a PNG plot (needs the extra `bench`)")


def bench_serve(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.dataset import parse_dataset
    from headgate.bench.load import Load, run
    from headgate.bench.report import save_json, save_plot, saved, table

    dataset = parse_dataset(options.dataset)
    load = Load(
        url=options.url,
        api=options.api,
        model=options.model,
        pace=_pace(options, dataset),
        requests=_requests(options, dataset),
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        dataset=dataset,
        seed=options.seed,
        timeout_s=options.timeout,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
        tls=url_tls(options),
    )
    result = run(load, progress=sys.stderr.isatty())
    print(table(result))
    if options.json:
        save_json(saved(result), options.json)
    if options.plot:
        save_plot(result, options.plot)
    return 0 if result.completed else FAILED


def _requests(options: argparse.Namespace, dataset: Dataset) -> int:
    from headgate.bench.dataset import Trace

    if options.requests is None:
        return sys.maxsize if isinstance(dataset, Trace) else 100
    requests: int = options.requests
    return requests


def _pace(options: argparse.Namespace, dataset: Dataset) -> Pace:
    from headgate.bench.dataset import Trace
    from headgate.bench.load import AsRecorded, ClosedLoop, OpenLoop

    if options.rate is not None:
        return OpenLoop(options.rate)
    if options.concurrency is None and isinstance(dataset, Trace):
        return AsRecorded()
    return ClosedLoop(8 if options.concurrency is None else options.concurrency)


def add_bench_lifecycle(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench lifecycle [URL ...] [options]"
    command.set_defaults(run=bench_lifecycle)
    add = command.add_argument
    add("url", nargs="*", metavar="URL", help="servers, tested in turn (default: http://127.0.0.1:8000)")
    add("--concurrency", type=int, default=8, metavar="N", help="concurrent answers (default: %(default)s)")
    add("--rounds", type=int, default=20, metavar="N", help="rounds per operation (default: %(default)s)")
    add("--max-tokens", type=int, default=1000, metavar="N", help="length of answers that are not aborted (1000)")
    add("--model", help="model name (default: the first one listed)")
    add("--api-key", metavar="KEY", help="admin key; default: $HEADGATE_ADMIN_KEY")
    add_url_ca(add)
    add("--json", type=result_file, metavar="FILE", help="write the results as JSON")


def bench_lifecycle(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.lifecycle import LifecycleTrial, run, table
    from headgate.bench.report import save_json

    reports = run(
        [
            LifecycleTrial(
                url=url,
                concurrency=options.concurrency,
                rounds=options.rounds,
                max_tokens=options.max_tokens,
                model=options.model,
                api_key=options.api_key or environ.get("HEADGATE_ADMIN_KEY"),
                tls=url_tls(options),
            )
            for url in options.url or ["http://127.0.0.1:8000"]
        ]
    )
    print(table(reports))
    if options.json:
        save_json(reports, options.json)
    return 0


def add_shared(command: argparse.ArgumentParser) -> None:
    """Add the flags that several benchmarks share."""
    add = command.add_argument
    add("--model", help="model name (default: the first one listed)")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")
    add_url_ca(add)
    add("--json", type=result_file, metavar="FILE", help="write the results as JSON")


def add_bench_prefix(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench prefix [URL] [options]"
    command.set_defaults(run=bench_prefix)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="a server (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="distinct prefixes (default: %(default)s)")
    add("--warm", type=int, default=4, metavar="N", help="requests per prefix after the first (default: %(default)s)")
    add("--prefix-words", type=int, default=512, metavar="N", help="words per prefix (default: %(default)s)")
    add_shared(command)


def bench_prefix(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.prefix import PrefixTrial, run, table
    from headgate.bench.report import save_json

    trial = PrefixTrial(
        url=options.url,
        rounds=options.rounds,
        warm=options.warm,
        prefix_words=options.prefix_words,
        model=options.model,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
        tls=url_tls(options),
    )
    report = run(trial)
    print(table(report))
    if options.json:
        save_json(report, options.json)
    return 0


def add_bench_disagg(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench disagg [URL] [options]"
    command.set_defaults(run=bench_disagg)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8080", metavar="URL", help="a router (default: %(default)s)")
    add("--streams", type=int, default=4, metavar="N", help="concurrent streams (default: %(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens per stream (default: %(default)s)")
    add("--prompts", type=int, default=16, metavar="N", help="number of long prompts (default: %(default)s)")
    add("--prompt-words", type=int, default=1024, metavar="N", help="words per long prompt (default: %(default)s)")
    add("--interval", type=float, default=0.5, metavar="S", help="time between long prompts (default: %(default)s)")
    add_shared(command)


def bench_disagg(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.disagg import DisaggTrial, run, table
    from headgate.bench.report import save_json

    trial = DisaggTrial(
        url=options.url,
        streams=options.streams,
        max_tokens=options.max_tokens,
        prompts=options.prompts,
        prompt_words=options.prompt_words,
        interval_s=options.interval,
        model=options.model,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
        tls=url_tls(options),
    )
    report = run(trial)
    print(table(report))
    if options.json:
        save_json(report, options.json)
    return FAILED if report.errors else 0


def add_bench_router(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench router [URL] [options]"
    command.set_defaults(run=bench_router)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8080", metavar="URL", help="a router (default: %(default)s)")
    add(
        "--direct",
        action="append",
        default=[],
        metavar="URL",
        help="worker to compare with (default: those that answered)",
    )
    add("--conversations", type=int, default=16, metavar="N", help="concurrent conversations (default: %(default)s)")
    add("--turns", type=int, default=4, metavar="N", help="turns per conversation (default: %(default)s)")
    add("--system-prompts", type=int, default=4, metavar="N", help="shared system prompts (default: %(default)s)")
    add(
        "--think", type=float, default=1.0, metavar="S", help="mean pause before each question (default: %(default)s)"
    )
    add("--zipf", action="store_true", help="choose system prompts by a Zipf distribution")
    add("--system-words", type=int, default=256, metavar="N", help="words per system prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=16, metavar="N", help="tokens per answer (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="generate exactly --max-tokens (if the server can)")
    add("--rounds", type=int, default=50, metavar="N", help="requests timed one at a time (default: %(default)s)")
    add(
        "--concurrency",
        type=int,
        default=8,
        metavar="N",
        help="clients of the throughput test (default: %(default)s)",
    )
    add("--seed", type=int, metavar="N", help="seed of prompts (default: random, so no cache hits)")
    add_shared(command)


def bench_router(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.report import save_json
    from headgate.bench.router import RouterTrial, run, table

    trial = RouterTrial(
        url=options.url,
        direct=tuple(options.direct),
        conversations=options.conversations,
        turns=options.turns,
        system_prompts=options.system_prompts,
        system_words=options.system_words,
        zipf=options.zipf,
        ignore_eos=options.ignore_eos,
        think_s=options.think,
        max_tokens=options.max_tokens,
        rounds=options.rounds,
        concurrency=options.concurrency,
        seed=options.seed,
        model=options.model,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
        tls=url_tls(options),
    )
    report = run(trial)
    print(table(report))
    if options.json:
        save_json(report, options.json)
    return FAILED if report.errors else 0


def add_bench_compare(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=bench_compare)
    add = command.add_argument
    add("file", nargs="+", type=Path, metavar="FILE", help="--json output of a benchmark; ratios are to the first")
    add("--plot", type=result_file, metavar="FILE", help="write a PNG plot (needs the extra `bench`)")


def bench_compare(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.compare import read_runs, save_plot, table

    runs = read_runs(options.file)
    print(table(runs))
    if options.plot:
        save_plot(runs, options.plot)
    return 0
