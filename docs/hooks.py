"""Build hooks of the documentation site: they add pages generated from the code and pages from the repository root.

Generated pages are not stored, so they always match the code. `tests/test_docs.py` checks the same pages.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from headgate import __version__, cli
from headgate import config as configs
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.accounting.metrics_page import MetricsPage
from headgate.contract import operations as declarations
from headgate.contract.compatible import COMPATIBLE, CompatibleField
from headgate.contract.openapi import router_description, server_description
from headgate.contract.operations.operation import ERRORS, AskAll, AskOne, Operation, Relay, RouterHandler
from headgate.contract.operations.table import OPERATIONS
from headgate.contract.parameter import APIS, Api, SamplingParameter
from headgate.contract.sampling import PARAMETERS, SAMPLING
from headgate.contract.schema import Generation
from headgate.text.parsers.families import REASONING, TOOLS, ReasoningFamily, ToolFamily

ROOT = Path(__file__).parents[1]

# Pages of the site that are files of the repository.
FROM_ROOT = {
    "index.md": "README.md",
    "index.zh-CN.md": "README.zh-CN.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


# ----------------------------------------------------------------------------------------------- what mkdocs calls


def on_config(config: Any) -> Any:
    """Add pages that the navigation does not name to the guides."""
    named = set(re.findall(r"[\w./-]+\.md", repr(config.nav)))
    guides = next(section["Guides"] for section in config.nav if "Guides" in section)
    guides += [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in named]
    internals = next(section["Internals"] for section in config.nav if "Internals" in section)
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    internals.append({"Decisions": [f"decisions/{page.name}" for page in decisions]})
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return relinked(markdown, page.file.src_uri)


# ------------------------------------------------------------------------------------------------------------ pages


def made_pages() -> dict[str, str]:
    """Every page that is not a file in this folder, by its path in the site."""
    return {path: (ROOT / source).read_text("utf-8") for path, source in FROM_ROOT.items()} | {
        "reference/http.md": http_page(),
        "reference/sampling.md": sampling_page(),
        "reference/command-line.md": command_page(),
        "reference/configuration.md": configuration_page(),
        "reference/metrics.md": metrics_page(),
    }


IMAGE = re.compile(r"!\[([^\[\]]*)\]\((?!\w+:)([^()\s]+)\)")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^()\s]+)\)")


def relinked(markdown: str, page: str) -> str:
    """Turn links between files of the repository into links between pages; a target that is no page loses its link."""
    source = PurePosixPath(FROM_ROOT.get(page, f"docs/{page}"))
    pages = {name: path for path, name in FROM_ROOT.items()}

    def place_image(match: re.Match[str]) -> str:
        text, target = match.groups()
        file = os.path.normpath(source.parent / target).removeprefix("docs/")
        return f"![{text}]({os.path.relpath(file, PurePosixPath(page).parent)})"

    def place(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        file = os.path.normpath(source.parent / path)
        found = pages.get(file) or (file.removeprefix("docs/") if re.fullmatch(r"docs/.*\.md", file) else None)
        if found is None:
            return match[0] if page.startswith("reference/") else text
        here = os.path.relpath(found, PurePosixPath(page).parent)
        return f"[{text}]({here}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(place, IMAGE.sub(place_image, markdown))


# --------------------------------------------------------------------------------------------------------- HTTP API


INTRODUCTION = (
    "Generated from the same declarations as `GET /openapi.json` of servers and routers. Any call to a router can also "
    "return 502 or 503, when no worker is available or the worker is lost. Calls that only routers have: "
    "[workers](../router.md#workers), [scaling](../ray.md#scaling)."
)


# Titles of the sections, by the module in `contract/operations` that declares their operations.
SECTIONS = {
    "generation": "Generation",
    "status": "Models, health and metrics",
    "control": "Control",
    "fleet": "Workers and scaling",
    "sglang": "Compatible with SGLang",
    "vllm": "Compatible with vLLM",
    "trl": "Compatible with TRL",
}


def http_page() -> str:
    server = msgspec.json.decode(server_description(__version__))
    router = msgspec.json.decode(router_description(__version__))
    schemas = router["components"]["schemas"] | server["components"]["schemas"]
    lines = ["# HTTP API reference", "", INTRODUCTION, "", "## Errors", ""]
    lines += [f"Their body is {type_of({'$ref': 'ErrorBody'})}.", "", "| status | means |", "|---|---|"]
    lines += [f"| {status} | {meaning} |" for status, meaning in ERRORS.items()]
    for module, operations in groupby(filter(attrgetter("in_api"), OPERATIONS), _module):
        lines += ["", f"## {SECTIONS.get(module, module.capitalize())}", ""]
        for operation in operations:
            lines += [*_operation(operation, server if operation.on_server else router, router), ""]
    return "\n".join([*lines, "## Types", "", *_types(lines, schemas)])


def _module(operation: Operation) -> str:
    modules = (module for _, module in inspect.getmembers(declarations, inspect.ismodule))
    return next(module.__name__.rpartition(".")[2] for module in modules if operation in vars(module).values())


def _types(lines: list[str], schemas: dict[str, Any]) -> list[str]:
    """The types to which `lines` link, directly or through other types."""
    sections: dict[str, list[str]] = {}
    titles = {name.lower(): name for name in schemas}
    waiting = lines
    while linked := {titles[link] for link in re.findall(r"\(#(\w+)\)", "\n".join(waiting))} - sections.keys():
        added = {name: _component(name, schemas[name]) for name in linked}
        sections |= added
        waiting = [line for section in added.values() for line in section]
    return [line for _, section in sorted(sections.items()) for line in [*section, ""]]


def _operation(operation: Operation, document: dict[str, Any], router: dict[str, Any]) -> list[str]:
    lines = [f"### `{operation}`", "", f"{operation.summary}.", ""]
    lines += [f"Access: {operation.access.value}. On a router: {routed(operation)}.", ""]
    if operation.body is not None:
        lines += [*_body("Body", operation, document), ""]
    if operation.router_body is not None:
        lines += [*_body("Body on a router", operation, router), ""]
    failures = []
    form = usual = type_of({"$ref": "ErrorBody"})
    for code, response in _described(operation, document)["responses"].items():
        bodies = [_content(kind, each["schema"]) for kind, each in response.get("content", {}).items()]
        if len(bodies) == 1 and "ErrorBody]" in bodies[0]:
            form = bodies[0]
            failures.append(code)
        else:
            lines += [f"{code}: {' or '.join(bodies) or 'nothing'}", ""]
    return [*lines, f"Errors: {', '.join(failures)}{f', as {form}' if form != usual else ''}"]


def _described(operation: Operation, document: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = document["paths"][operation.path][operation.method.lower()]
    return described


def _body(title: str, operation: Operation, document: dict[str, Any]) -> list[str]:
    """The fields of the body if it is an object, else its type."""
    schema = _described(operation, document)["requestBody"]["content"]["application/json"]["schema"]
    name = schema.get("$ref", "").rpartition("/")[2]
    component = document["components"]["schemas"].get(name, {})
    if not component.get("properties"):
        return [f"{title}: {type_of(schema)}"]
    lines = [f"{title}:", "", *_fields(name, component)]
    if any(_is_compatible(field, each) for field, each in component["properties"].items()):
        lines += ["", "It also accepts some values of [fields of other systems](../api.md#fields-of-other-systems)."]
    return lines


def _is_compatible(field: str, schema: dict[str, Any]) -> bool:
    return not schema.keys() - {"default"} and field in COMPATIBLE_NAMES


def routed(operation: Operation) -> str:
    match operation.fan_out:
        case Relay():
            return "relayed to one worker"
        case RouterHandler():
            return "answered for the fleet" if operation.on_server else "routers only"
        case AskOne():
            return "answered by any worker"
        case AskAll():
            return "sent to all workers"
    return "not available"


TABLE = re.compile(r"(?<=<!-- begin: python docs/hooks.py writes this table -->\n).*(?=<!-- end -->)", re.DOTALL)


def with_table(page: str) -> str:
    """docs/api.md with the table of all operations brought up to date."""
    rows = ["| operation | summary | access | on a router |", "|---|---|---|---|"]
    rows += [
        f"| `{operation}` | {operation.summary} | {operation.access.value} | {routed(operation)} |"
        for operation in OPERATIONS
        if operation.in_api
    ]
    return TABLE.sub(lambda _: "\n".join(["", *rows, "", ""]), page)


FIELDS = re.compile(
    r"(?<=<!-- begin: python docs/hooks.py writes these fields -->\n).*?(?=<!-- end of fields -->)", re.DOTALL
)


def with_fields(page: str) -> str:
    """docs/api.md with the table of compatible fields brought up to date."""
    rows = ["| field | in | accepted | why |", "|---|---|---|---|", *map(_field, COMPATIBLE)]
    return FIELDS.sub(lambda _: "\n".join(["", *rows, "", ""]), page)


PARSERS = re.compile(
    r"(?<=<!-- begin: python docs/hooks.py writes these parsers -->\n).*?(?=<!-- end of parsers -->)", re.DOTALL
)


def with_parsers(page: str) -> str:
    """docs/models.md with the tables of parsers brought up to date."""
    lines = [""]
    for flag, families in (("--reasoning-parser", REASONING), ("--tool-parser", TOOLS)):
        lines += [f"| `{flag}` | models | format | texts in the template |", "|---|---|---|---|"]
        lines += [*map(_family, families), ""]
    return PARSERS.sub(lambda _: "\n".join([*lines, ""]), page)


def _family(family: ReasoningFamily | ToolFamily) -> str:
    joint = " and " if isinstance(family, ReasoningFamily) else " or "
    signs = joint.join(f"`{sign}`" for sign in family.signs)
    row = (f"`{family.name}`", family.models, family.syntax, signs)
    return f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |"


BAR = "\\|"  # within a table


def _field(field: CompatibleField) -> str:
    name = field.name if field.place == "body" else f"{field.place}.{field.name}"
    values = "any" if field.accepted is None else f"`{field.values}`"
    return f"| `{name}` | {', '.join(API_TITLES[api] for api in field.apis)} | {values} | {field.why} |"


def _content(kind: str, schema: dict[str, Any]) -> str:
    return type_of(schema) if kind == "application/json" else f"`{kind}`"


def _component(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if "description" in schema:
        lines += [" ".join(schema["description"].split()), ""]
    if "properties" not in schema:
        return [*lines, type_of(schema)]
    return [*lines, *_fields(name, schema)]


def _fields(name: str, schema: dict[str, Any]) -> list[str]:
    meanings = _meanings(name)
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for field, each in schema["properties"].items():
        if not _is_compatible(field, each):
            lines.append(
                f"| `{field}` | {type_of(each)} | {_default(field, each, schema)} | {meanings.get(field, '')} |"
            )
    return lines


def _meanings(name: str) -> dict[str, str]:
    """The comments of a struct's fields, and the summaries of its sampling parameters."""
    owner = STRUCTS.get(name)
    if owner is None:
        return {}
    sampling = PARAMETERS.values() if issubclass(owner, Generation) else ()
    found = {alias: each.summary for each in sampling for api in APIS for alias in each.names_in(api)}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("headgate.") and "<" not in base.__qualname__:
            found |= _comments(base)
    return found


def _structs() -> dict[str, type]:
    """The structs of request and answer bodies, by name."""
    found: dict[str, type] = {}
    waiting: list[type] = [msgspec.Struct]
    while waiting:
        for each in waiting.pop().__subclasses__():
            waiting.append(each)
            if each.__module__.startswith(("headgate.contract.", "headgate.protocol.")):
                found[each.__name__] = each
    return found


STRUCTS = _structs()
COMPATIBLE_NAMES = {each.name for each in COMPATIBLE if each.place == "body"}


def _default(field: str, schema: dict[str, Any], owner: dict[str, Any]) -> str:
    if field in owner.get("required", ()):
        return "needed"
    return f"`{schema['default']}`" if schema.get("default") not in (None, [], {}) else ""


def type_of(schema: dict[str, Any]) -> str:
    """A JSON schema as text."""
    match schema:
        case {"$ref": str(reference)}:
            name = reference.rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"anyOf": list(options)}:
            return " or ".join(dict.fromkeys(type_of(each) for each in options))
        case {"enum": list(values)}:
            return " or ".join(f"`{value}`" for value in values)
        case {"const": value}:
            return f"`{value}`"
        case {"type": "array", "items": dict(items)}:
            return f"list of {type_of(items)}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"object of {type_of(values)}"
        case {"type": str(kind)}:
            return kind + _bounds(schema)
    return "anything"


WIDE = 2**31 - 1  # the bound of the integer type itself, not worth showing


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
    words |= {"minLength": "length ≥", "maxLength": "length ≤"}
    told = [f"{word} {schema[name]}" for name, word in words.items() if abs(schema.get(name, WIDE)) < WIDE]
    return f" ({', '.join(told)})" if told else ""


# ----------------------------------------------------------------------------------------------- sampling parameters

API_TITLES: dict[Api, str] = {
    "chat": "chat",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
    "sglang": "SGLang",
    "vllm": "vLLM",
}


def sampling_page() -> str:
    lines = [
        "# Sampling parameters",
        "",
        "Every parameter, and its name in each API: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, and the",
        "`sampling_params` of SGLang's `/generate` and vLLM's `/inference/v1/generate`. `null` is the same as leaving a",
        "parameter out, except for SGLang's `max_new_tokens`, where it removes the limit. A value of the wrong type is",
        "refused with the code `invalid_type`, and one that is not allowed with `invalid_value`; `param` names the field.",
        f"The fields of `headgate.SamplingParams` are those down to `{list(SAMPLING)[-1]}`; the rest concern text.",
        "",
        f"| parameter | type | allowed | default | {' | '.join(API_TITLES[api] for api in APIS)} |",
        f"|{'---|' * (4 + len(APIS))}",
    ]
    lines += [_parameter(each) for each in PARAMETERS.values()]
    lines += ["", "What they do:", ""]
    lines += [f"- `{each.name}`: {each.summary}" for each in PARAMETERS.values()]
    return "\n".join([*lines, ""])


def _parameter(parameter: SamplingParameter) -> str:
    kind = type_of(_without_null(msgspec.json.schema(parameter.json)))
    allowed = ", ".join(rule.words for rule in parameter.rules)
    names = [", ".join(f"`{name}`" for name in parameter.names_in(api)) for api in APIS]
    return f"| `{parameter.name}` | {kind} | {allowed} | {_defaults(parameter)} | {' | '.join(names)} |"


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    options = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return options[0] if len(options) == 1 else schema


def _defaults(parameter: SamplingParameter) -> str:
    default = "" if parameter.default in (None, {}, ()) else f"`{json.dumps(parameter.default)}`"
    others = (f"{API_TITLES[api]}: `{json.dumps(value)}`" for api, value in parameter.defaults.items())
    return "; ".join(filter(None, (default, *others)))


# ----------------------------------------------------------------------------------- command line and configuration


def command_page() -> str:
    lines = ["# Command line", "", f"The output of `--help`, version {__version__}.", ""]
    for command in _parsers(cli.parser()):
        # Python versions wrap help texts differently; the page must not depend on the version.
        command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100, max_help_position=28)
        lines += [f"## `{command.prog}`", "", "```", command.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _parsers(command)


def configurations() -> list[type]:
    """The dataclasses of `headgate.config`, in the order in which they are written there."""
    found = [each for _, each in inspect.getmembers(configs, inspect.isclass) if each.__module__ == configs.__name__]
    return sorted(found, key=lambda each: inspect.getsourcelines(each)[1])


def configuration_page() -> str:
    lines = [
        "# Configuration",
        "",
        "The settings of an engine, a server and a router (`headgate.config`). Command-line flags set the fields of the",
        "same name; `LLM(path, field=value, ...)` accepts the fields of `EngineConfig`.",
        "",
    ]
    for each in configurations():
        comments = _comments(each)
        lines += [f"## {each.__name__}", "", "| field | type | default | |", "|---|---|---|---|"]
        for field in fields(each):
            kind = str(field.type).replace("|", "\\|")
            lines.append(f"| `{field.name}` | `{kind}` | {_value(field)} | {comments.get(field.name, '')} |")
        lines.append("")
    return "\n".join(lines)


def _value(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "needed" if field.default_factory is MISSING else ""
    return "" if is_dataclass(field.default) else f"`{field.default!r}`"


def _comments(owner: type) -> dict[str, str]:
    """The comments that follow the fields of a dataclass or struct."""
    found = re.findall(r"^ {4}(\w+): [^#\n]*?(?:\(\n[^#\n]*?)?#\s*(.*)$", inspect.getsource(owner), re.MULTILINE)
    return {name: comment.replace("|", "\\|") for name, comment in found}


# ---------------------------------------------------------------------------------------------------------- metrics


def metrics_page() -> str:
    page = MetricsPage(version=__version__, model="", metrics=ServerMetrics(), in_flight=0, limit=0, engines=[])
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` of a server returns these in Prometheus format, along with metrics of the process",
        "(`process_…`). Those of a router are listed in [its guide](../router.md#metrics).",
        "",
    ]
    lines += ["| metric | kind | labels | |", "|---|---|---|---|"]
    for family in page.families():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    API_PAGE = ROOT / "docs/api.md"
    API_PAGE.write_text(with_fields(with_table(API_PAGE.read_text("utf-8"))), "utf-8")
    MODELS_PAGE = ROOT / "docs/models.md"
    MODELS_PAGE.write_text(with_parsers(MODELS_PAGE.read_text("utf-8")), "utf-8")
