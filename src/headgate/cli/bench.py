"""`headgate bench ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.cli.exits import FAILED

if TYPE_CHECKING:
    from headgate.bench.dataset import Dataset
    from headgate.bench.load import Pace


def result_file(text: str) -> Path:
    """A file that can be written later: that it cannot is better known before a long run than after it."""
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
        "--rate", type=float, metavar="PER_S", help="open loop: requests arrive at random, so many a second"
    )
    pace.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: N clients, each waiting (default: 8)"
    )
    add("--requests", type=int, metavar="N", help="how many in all (default: 100, or the whole trace)")
    add("--dataset", default="random", help="random, shared-prefix, multi-turn, trace:FILE (random)")
    add("--seed", type=int, default=0, help="of arrivals and prompts (default: 0)")
    add("--timeout", type=float, default=600.0, metavar="S", help="for one request (default: 600)")

    add = command.add_argument_group("requests").add_argument
    add("--api", choices=("chat", "completions"), default="chat", help="default: chat")
    add("--model", help="name (default: the first that the server lists)")
    add("--prompt-words", type=int, default=64, metavar="N", help="words in a prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens in an answer (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="answers always have --max-tokens (not every server can)")
    add("--api-key", metavar="KEY", help="else $OPENAI_API_KEY")

    add = command.add_argument_group("results").add_argument
    add("--json", type=result_file, metavar="FILE", help="write them, and every request, as JSON")
    add("--plot", type=result_file, metavar="FILE", help="draw them as PNG (needs the extra `bench`)")


def bench_serve(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.dataset import parse_dataset
    from headgate.bench.load import Load, run
    from headgate.bench.report import save_json, save_plot, table

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
    )
    result = run(load, progress=sys.stderr.isatty())
    print(table(result))
    if options.json:
        save_json(result, options.json)
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
    add("url", nargs="*", metavar="URL", help="servers, one after another (default: http://127.0.0.1:8000)")
    add("--concurrency", type=int, default=8, metavar="N", help="answers at once (default: %(default)s)")
    add("--rounds", type=int, default=20, metavar="N", help="of each kind (default: %(default)s)")
    add("--max-tokens", type=int, default=1000, metavar="N", help="of an answer that nobody ends (default: 1000)")
    add("--model", help="name (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="the admin's; else $HEADGATE_ADMIN_KEY")
    add("--json", type=result_file, metavar="FILE", help="write the results as JSON")


def bench_lifecycle(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.lifecycle import LifecycleTrial, run, save_json, table

    reports = run(
        [
            LifecycleTrial(
                url=url,
                concurrency=options.concurrency,
                rounds=options.rounds,
                max_tokens=options.max_tokens,
                model=options.model,
                api_key=options.api_key or environ.get("HEADGATE_ADMIN_KEY"),
            )
            for url in options.url or ["http://127.0.0.1:8000"]
        ]
    )
    print(table(reports))
    if options.json:
        save_json(reports, options.json)
    return 0


def add_shared(command: argparse.ArgumentParser) -> None:
    """What every trial of an ordinary client takes."""
    add = command.add_argument
    add("--model", help="name (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="else $OPENAI_API_KEY")
    add("--json", type=result_file, metavar="FILE", help="write the results as JSON")


def add_bench_prefix(command: argparse.ArgumentParser) -> None:
    command.usage = "headgate bench prefix [URL] [options]"
    command.set_defaults(run=bench_prefix)
    add = command.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="a server (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="prefixes (default: %(default)s)")
    add("--warm", type=int, default=4, metavar="N", help="requests with each, after the first (default: %(default)s)")
    add("--prefix-words", type=int, default=512, metavar="N", help="words in a prefix (default: %(default)s)")
    add_shared(command)


def bench_prefix(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.prefix import PrefixTrial, run, save_json, table

    trial = PrefixTrial(
        url=options.url,
        rounds=options.rounds,
        warm=options.warm,
        prefix_words=options.prefix_words,
        model=options.model,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
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
    add("--streams", type=int, default=4, metavar="N", help="answers at once (default: %(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="of each of them (default: %(default)s)")
    add("--prompts", type=int, default=16, metavar="N", help="long prompts (default: %(default)s)")
    add("--prompt-words", type=int, default=1024, metavar="N", help="words in each (default: %(default)s)")
    add("--interval", type=float, default=0.5, metavar="S", help="from one to the next (default: %(default)s)")
    add_shared(command)


def bench_disagg(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.disagg import DisaggTrial, run, save_json, table

    trial = DisaggTrial(
        url=options.url,
        streams=options.streams,
        max_tokens=options.max_tokens,
        prompts=options.prompts,
        prompt_words=options.prompt_words,
        interval_s=options.interval,
        model=options.model,
        api_key=options.api_key or environ.get("OPENAI_API_KEY"),
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
    add("--direct", action="append", default=[], metavar="URL", help="a worker to compare with (whoever answers)")
    add("--conversations", type=int, default=16, metavar="N", help="at once (default: %(default)s)")
    add("--turns", type=int, default=4, metavar="N", help="of each (default: %(default)s)")
    add("--system-prompts", type=int, default=4, metavar="N", help="that they share (default: %(default)s)")
    add("--think", type=float, default=1.0, metavar="S", help="before a question, on average (default: %(default)s)")
    add("--zipf", action="store_true", help="the first of them is most conversations', the second half as many'")
    add("--system-words", type=int, default=256, metavar="N", help="words in each (default: %(default)s)")
    add("--max-tokens", type=int, default=16, metavar="N", help="tokens in an answer (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="answers always have --max-tokens (not every server can)")
    add("--rounds", type=int, default=50, metavar="N", help="requests timed one by one (default: %(default)s)")
    add("--concurrency", type=int, default=8, metavar="N", help="clients at once, for requests/s (%(default)s)")
    add("--seed", type=int, metavar="N", help="of prompts (default: such as no cache has seen)")
    add_shared(command)


def bench_router(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.router import RouterTrial, run, save_json, table

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
    )
    report = run(trial)
    print(table(report))
    if options.json:
        save_json(report, options.json)
    return FAILED if report.errors else 0


def add_bench_compare(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=bench_compare)
    add = command.add_argument
    add("file", nargs="+", type=Path, metavar="FILE", help="what a bench wrote with --json; ratios are to the first")
    add("--plot", type=result_file, metavar="FILE", help="draw them as PNG (needs the extra `bench`)")


def bench_compare(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from headgate.bench.compare import read_runs, save_plot, table

    runs = read_runs(options.file)
    print(table(runs))
    if options.plot:
        save_plot(runs, options.plot)
    return 0
