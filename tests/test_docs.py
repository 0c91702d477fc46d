"""The documentation is complete and correct: everything is documented, links resolve, and the examples run."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import msgspec
import pytest

from headgate import cli
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.accounting.metrics_page import MetricsPage
from headgate.cli.completion import nodes
from headgate.contract.compatible import COMPATIBLE
from headgate.contract.operations.operation import Access, Operation
from headgate.contract.operations.table import OPERATIONS
from headgate.contract.parameter import APIS
from headgate.contract.sampling import PARAMETERS
from headgate.testing.tiny import tiny_model
from tests.api.live import LiveServer, live_server
from tests.router.test_up import up

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
TRANSLATED = [("README.md", "README.zh-CN.md"), ("docs/quickstart.md", "docs/quickstart.zh-CN.md")]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"documentation_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return load("hooks")


@pytest.fixture(scope="module")
def made(hooks) -> dict[str, str]:
    return hooks.made_pages()


def blocks(text: str, language: str = r"\w*") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------------------------ completeness


def test_every_flag_and_command_is_documented(made):
    page = made["reference/command-line.md"]
    for node in nodes(cli.parser()):
        assert f"## `headgate{' ' * bool(node.path)}{node.path}`" in page
        section = page.split(f"## `headgate{' ' * bool(node.path)}{node.path}`\n")[1].split("\n## ")[0]
        assert [name for flag in node.flags for name in flag.names if name not in section] == []


def test_every_endpoint_is_documented(made):
    page = made["reference/http.md"]
    for operation in OPERATIONS:
        assert (f"### `{operation}`" in page) == operation.in_api


def section(page: str, operation: Operation) -> str:
    return re.split(r"^##", page.split(f"### `{operation}`\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_operation_is_documented_with_access_body_answer_and_errors(made):
    compatible = {field.name for field in COMPATIBLE if field.place == "body"}
    for operation in filter(lambda each: each.in_api, OPERATIONS):
        text = section(made["reference/http.md"], operation)
        assert f"Access: {operation.access.value}. On a router: " in text and re.search(
            r"^200: \S", text, re.MULTILINE
        )
        assert {"400", "500"} <= set(re.findall(r"\d+", text.split("\nErrors: ")[1]))
        listed = {row.split("`")[1] for row in text.splitlines() if row.startswith("| `")}
        bodies = [body for body in (operation.body, operation.router_body) if hasattr(body, "__struct_fields__")]
        wanted = {field.encode_name for body in bodies for field in msgspec.structs.fields(body)}
        assert wanted - compatible <= listed <= wanted, operation
    pause = next(each for each in OPERATIONS if str(each) == "POST /v1/pause")
    assert "| `mode` | `abort` or `drain` or `freeze` | `abort` | " in section(made["reference/http.md"], pause)
    update = next(each for each in OPERATIONS if str(each) == "POST /v1/update_weights")
    assert "a folder, a safetensors or a GGUF file on this host" in section(made["reference/http.md"], update)


def test_the_table_of_operations_matches_the_code(hooks):
    page = (ROOT / "docs/api.md").read_text("utf-8")
    assert hooks.with_table(page) == page, "run python docs/hooks.py"
    assert "| `POST /v1/pause` | Pause all engines | admin | answered for the fleet |" in page


def test_the_table_of_compatible_fields_matches_the_code(hooks):
    page = (ROOT / "docs/api.md").read_text("utf-8")
    assert hooks.with_fields(page) == page, "run `python docs/hooks.py`"
    assert "`no_logs`" in page


def test_the_tables_of_parsers_match_the_code(hooks):
    page = (ROOT / "docs/models.md").read_text("utf-8")
    assert hooks.with_parsers(page) == page, "run `python docs/hooks.py`"
    assert page.count("| `gpt_oss` | gpt-oss |") == 2


def test_operations_that_need_no_key_are_documented():
    page = (ROOT / "docs/keys.md").read_text("utf-8")
    (sentence,) = re.findall(r"^(.*) and the empty page of the", page, re.MULTILINE)
    needs_no_key = [each.path for each in OPERATIONS if each.access is Access.OPEN and each.in_api]
    assert sorted(re.findall(r"`(.*?)`", sentence)) == sorted(needs_no_key)


def test_every_sampling_parameter_is_documented_with_its_names_and_bounds(made):
    page = made["reference/sampling.md"]
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == list(PARAMETERS)
    for each in PARAMETERS.values():
        named = [re.findall(r"`(\w+)`", cell) for cell in rows[each.name].split("|")[5:-1]]
        assert named == [list(each.names_in(api)) for api in APIS]
        assert all(rule.words in rows[each.name] for rule in each.rules)
        assert f"- `{each.name}`: {each.summary}" in page
    assert "| `temperature` | number | between 0 and 100 | `1.0` | `temperature` |" in page


def test_every_linked_type_exists(made):
    page = made["reference/http.md"]
    titles = {title.lower() for title in re.findall(r"^### (\w+)$", page, re.MULTILINE)}
    assert titles and set(re.findall(r"\(#(\w+)\)", page)) <= titles


def test_every_metric_is_documented(made):
    page = MetricsPage(version="0", model="", metrics=ServerMetrics(), in_flight=0, limit=0, engines=[])
    names = {line.split()[2] for line in page.render().decode().splitlines() if line.startswith("# TYPE headgate:")}
    assert len(names) > 20 and all(f"| `{name}` |" in made["reference/metrics.md"] for name in names)


def test_every_field_of_the_configuration_is_documented(hooks, made):
    page = made["reference/configuration.md"]
    for each in hooks.configurations():
        section = page.split(f"## {each.__name__}\n")[1].split("\n## ")[0]
        rows = {row.split("`")[1]: row for row in section.splitlines() if row.startswith("| `")}
        assert set(rows) == {field.name for field in fields(each)}
        assert [name for name, row in rows.items() if row.endswith("|  |")] == []  # each has a description
    assert "| `device` | `str` | `'auto'` | auto, cpu, cuda" in page


# -------------------------------------------------------------------------------------------------------------- links


def links(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\((?!\w+:)([^()\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page):
    for link in links(page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"{page.name} links to {link}"


def test_the_check_finds_links():
    assert links("[a](b.md) and [`c`](d/e.md#f), `[x](y)` and [z](http://z)") == ["b.md", "d/e.md#f"]


@pytest.mark.parametrize(
    ("page", "text", "linked"),
    [
        ("index.md", "[a](docs/rl.md)", "[a](rl.md)"),
        ("index.md", "[a](ARCHITECTURE.md#seams)", "[a](architecture.md#seams)"),
        ("index.md", "[a](docs/decisions)", "a"),
        ("index.md", "![a](docs/images/kill.svg)", "![a](images/kill.svg)"),
        ("dashboard.md", "![a](images/chaos.png)", "![a](images/chaos.png)"),
        ("decisions/0002.md", "![a](../images/chaos.png)", "![a](../images/chaos.png)"),
        ("performance.md", "[`r`](../benchmarks/results)", "`r`"),
        ("decisions/0002.md", "[a](../../ARCHITECTURE.md)", "[a](../architecture.md)"),
        ("rl.md", "[a](lifecycle.md#stop)", "[a](lifecycle.md#stop)"),
        ("rl.md", "[a](https://a.example)", "[a](https://a.example)"),
    ],
)
def test_links_between_files_become_links_between_pages(hooks, page, text, linked):
    assert hooks.relinked(text, page) == linked


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert all((tmp_path / "site" / f"{name}.html").is_file() for name in ("index", "keys", "reference/http"))
    # The built site loads nothing from the network.
    fetched = re.findall(
        r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\s\">]+)", (tmp_path / "site/rl.html").read_text()
    )
    assert fetched == []


# -------------------------------------------------------------------------------------------------------------- words


def sentences() -> Iterator[str]:
    """All messages in the source code, with … for the variable parts."""
    for path in (ROOT / "src/headgate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Constant(value=str(text)):
                    yield re.sub(r"%[sdg]", "…", text)
                case ast.JoinedStr(values):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in values)


def test_messages_quoted_in_troubleshooting_exist_in_the_code():
    messages = set(sentences())
    quoted = [block.strip() for block in blocks((ROOT / "docs/troubleshooting.md").read_text("utf-8"), "text")]
    assert len(quoted) > 20
    assert [quote for quote in quoted if not any(quote in sentence for sentence in messages)] == []


@pytest.mark.parametrize(("ours", "theirs"), TRANSLATED)
def test_a_translation_shows_the_same_code_and_the_same_sections(ours, theirs):
    original, translation = ((ROOT / name).read_text("utf-8") for name in (ours, theirs))
    assert blocks(original) == blocks(translation) != []
    levels = [
        re.findall(r"^(#+) ", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
        for text in (original, translation)
    ]
    assert levels[0] == levels[1]
    code = [
        re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
        for text in (original, translation)
    ]
    assert sorted(code[0]) == sorted(code[1])


def test_figures_of_the_readme_stand_in_the_pages_that_it_links():
    """The README repeats no figure that has since changed."""
    measured = (ROOT / "docs/performance.md").read_text("utf-8")
    section = (ROOT / "README.md").read_text("utf-8").split("## How fast")[1].split("\n## ")[0]
    figures = set(re.findall(r"(?<![\w.-])\d[\d,.]*\d(?![\w.-])", section))
    assert len(figures) > 10
    assert [
        figure for figure in figures if not re.search(rf"(?<![\d,.]){re.escape(figure)}(?![\d,]|\.\d)", measured)
    ] == []


# ----------------------------------------------------------------------------------------------------------- pictures


def drawn(svg: str) -> tuple[str, list[float]]:
    """The stream in the picture: its text, and the times at which its parts appear."""
    root = ElementTree.fromstring(svg)
    spans = [each for each in root.iter() if each.tag.endswith("tspan")]
    times = [float(animation.get("keyTimes", "").split(";")[1]) for span in spans for animation in span]
    assert len(times) == len(spans)
    return " ".join("".join(each.text or "" for each in spans).split()), times


def test_the_recording_of_a_kill_is_drawn_whole_and_in_order():
    record = load("record")
    pieces = [(0.2 + 0.03 * at, f" word{at}" + "\n" * (at == 50)) for at in range(100)]
    recording = record.Recording(pieces, killed_s=1.4, moved_s=1.5, pid=77, workers=("a", "b"))
    svg = record.draw(recording)
    text, times = drawn(svg)
    assert "".join(text.split()) == "".join(recording.text.split())
    assert times == sorted(times) and times[-1] < 1
    assert recording.pieces[recording.resumed] == pieces[44]
    shown = re.findall(r'class="(first|second)">([^<]*)', svg)
    assert [text for kind, text in shown if kind == "first"][-1].endswith("word43")
    assert next(text for kind, text in shown if kind == "second").startswith(" word44")
    assert "$ kill -9 77" in svg


def test_the_stored_recording_is_small_and_readable_in_light_and_dark():
    svg = (ROOT / "docs/images/kill.svg").read_text("utf-8")
    text, times = drawn(svg)
    assert len(svg.encode()) < 60_000 and "prefers-color-scheme:dark" in svg
    assert len(text) > 400 and times == sorted(times) and len(times) > 50
    assert 'class="first"' in svg and 'class="second"' in svg and "http://www.w3.org/2000/svg" in svg


def test_the_badges_state_what_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    titles = {name: badge(name).find("{http://www.w3.org/2000/svg}title") for name in ("license", "python")}
    assert titles["license"].text == f"license: {project['license']}"
    assert titles["python"].text == f"Python: {project['requires-python'].removeprefix('>=')} or later"
    shown = {name for page in ("README.md", "README.zh-CN.md") for name in badges(page)}
    assert shown == {file.stem.removeprefix("badge-") for file in (ROOT / "docs/images").glob("badge-*.svg")}
    assert badges("README.md") == badges("README.zh-CN.md")


def badge(name: str) -> ElementTree.Element:
    return ElementTree.fromstring((ROOT / f"docs/images/badge-{name}.svg").read_text("utf-8"))


def badges(page: str) -> list[str]:
    return re.findall(r"docs/images/badge-([\w-]+)\.svg", (ROOT / page).read_text("utf-8"))


# ----------------------------------------------------------------------------------------------------------- snippets

SHOWN = "http://127.0.0.1:8000"
KILLS = "SIGKILL"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("documented") / "tiny", max_position_embeddings=131072)


@pytest.fixture(scope="module")
def server(model) -> Iterator[LiveServer]:
    with live_server(model, device="cpu", kv_blocks=4096, max_running=8) as server:
        yield server


def snippets(language: str) -> list[str]:
    return [block for name, _ in TRANSLATED for block in blocks((ROOT / name).read_text("utf-8"), language)]


def environment() -> dict[str, str]:
    tools = Path(sys.executable).parent
    return os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OPENAI_API_KEY": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "snippet", [each for each in snippets("sh") if KILLS not in each], ids=lambda snippet: snippet.split("\n")[0][:50]
)
def test_shown_commands_run(snippet, server):
    if snippet.startswith("make "):
        target = shlex.split(snippet)[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif re.match(r"(\.venv/bin/)?headgate (serve|up|chat|run) ?", snippet):  # would not end
        for line in snippet.replace("\\\n", " ").splitlines():
            assert cli.parser().parse_args(shlex.split(line)[1:]).run
    else:
        # An HTTP error must fail the script, which it does not with plain curl.
        script = 'set -e\ncurl() { command curl --fail-with-body -sS "$@"; }\n' + snippet.replace(SHOWN, server.url)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment())
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets("python"), ids=lambda snippet: snippet.split("\n")[0][:50])
def test_shown_programs_run(snippet, server, model, tmp_path):
    program = snippet.replace(SHOWN, server.url).replace("path/to/model", str(model))
    command = [sys.executable, "-c", program]
    for _ in range(5):  # a model with random weights may produce no text
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if done.stdout:
            return
    pytest.fail("the program never printed anything")


@pytest.mark.slow
def test_the_stopped_answer_of_the_quickstart_is_stopped(server):
    (snippet,) = [each for each in snippets("sh") if "DELETE" in each]
    longer = snippet.replace(SHOWN, server.url).replace('"max_tokens": 400', '"max_tokens": 100000')
    done = subprocess.run(["bash", "-c", longer], capture_output=True, text=True, timeout=60, env=environment())
    assert '"finish_reason":"abort"' in done.stdout and '"cause":"api_abort"' in done.stdout


@pytest.mark.slow
def test_the_fleet_of_the_quickstart_survives(model, tmp_path):
    (snippet,) = {each for each in snippets("sh") if KILLS in each}
    with up(model, "--max-context", 65536, "--kv-blocks", 2048) as fleet:
        longer = snippet.replace(SHOWN, fleet.url).replace('"max_tokens": 300', '"max_tokens": 20000')
        command = ["bash", "-c", longer]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path)
    assert "kill -9" in done.stdout and "data: [DONE]" in done.stdout, done.stdout + done.stderr
    assert any("has exited; restarting it" in message for message in fleet.messages())
    told = [
        json.loads(line[6:]) for line in (tmp_path / "tale.txt").read_text().splitlines() if line[:7] == "data: {"
    ]
    assert not any("error" in event for event in told) and len(told) > 100
    assert told[-1]["choices"][0]["finish_reason"] == "length"
