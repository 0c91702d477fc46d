"""The files in `deploy/` match the code: metrics, flags, paths and variables exist, and manifests fit their schemas."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headgate import __version__, cli
from headgate.api.accounting.metrics import ServerMetrics
from headgate.api.accounting.metrics_page import MetricsPage
from headgate.api.app import ROUTES
from headgate.api.server import FINAL_SEND_S
from headgate.doctor import EXTRAS
from headgate.protocol.command import State

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana/headgate.json"
ALERTS = DEPLOY / "prometheus/alerts.yaml"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
YAML = sorted(DEPLOY.rglob("*.yaml"))
KUBERNETES_VERSION = "1.30"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def manifests() -> list[dict[str, Any]]:
    return [document for path in KUBERNETES if path.name != "kustomization.yaml" for document in documents(path)]


def pod() -> dict[str, Any]:
    (stateful,) = [each for each in manifests() if each["kind"] == "StatefulSet"]
    return stateful["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


# ---------------------------------------------------------------------------------------------------------- metrics


def exported() -> set[str]:
    """Every metric name that a query may use, including families without samples."""
    page = MetricsPage(version="0", model="m", metrics=ServerMetrics(), in_flight=0, limit=1, engines=[])
    names = {"up"}
    for family in text_string_to_metric_families(page.render().decode()):
        names |= {family.name, *(sample.name for sample in family.samples)}
        names |= {family.name + "_total"} if family.type == "counter" else set()
    return names


def names_in(expression: str) -> set[str]:
    """Metric names in a query: everything but labels, strings, functions and keywords."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]|\{[^}]*\}', " ", expression)
    bare = re.sub(r"\b(by|without)\s*\([^)]*\)", " ", bare)
    return {name for name in re.findall(r"[a-zA-Z_][\w:]*(?!\w*\s*\()", bare) if not re.search(rf"{name}\s*\(", bare)}


def queries() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield re.fullmatch(r"label_values\((.*), \w+\)", variable["query"])[1]
    for rule in rules():
        yield rule["expr"]


def rules() -> list[dict[str, Any]]:
    (document,) = documents(ALERTS)
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_every_queried_metric_is_exported(query):
    assert names_in(query) and names_in(query) <= exported()
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)


def test_the_check_finds_a_missing_metric():
    assert names_in('sum by (le) (rate(headgate:nothing_total{a="b"}[5m])) / up > 1') == {
        "headgate:nothing_total",
        "up",
    }
    assert "headgate:nothing_total" not in exported()


def test_queried_labels_belong_to_the_metric():
    states = {value for query in queries() for value in re.findall(r'state="(\w+)"', query)}
    assert states and states <= set(get_args(State))


def test_panels_have_distinct_ids_and_positions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids) > 10
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_alerts_have_a_severity_and_a_description():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))


def test_prometheus_loads_the_existing_rule_files():
    (document,) = documents(DEPLOY / "prometheus/prometheus.yaml")
    assert all((DEPLOY / "prometheus" / name).is_file() for name in document["rule_files"])
    (job,) = document["scrape_configs"]
    assert job["job_name"] == "headgate" and job["static_configs"][0]["targets"] == ["headgate:8000"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_every_yaml_file_is_yaml(path):
    assert all(isinstance(document, dict) for document in documents(path))


# ------------------------------------------------------------------------------------------------------- kubernetes


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_a_manifest_fits_its_schema_and_names_no_namespace(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    assert "namespace" not in manifest["metadata"]
    assert manifest["metadata"]["labels"] == {"app.kubernetes.io/name": "headgate"}


def test_the_schema_check_refuses_an_unknown_field():
    manifest = json.loads(json.dumps(manifests()[0])) | {"spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_kustomize_lists_every_manifest():
    (document,) = documents(DEPLOY / "kubernetes/kustomization.yaml")
    there = {path.name for path in KUBERNETES} - {"kustomization.yaml"}
    assert set(document["resources"]) == there
    assert document["images"] == [{"name": container()["image"], "newTag": __version__}]


def test_a_server_has_no_rights_it_does_not_need():
    kinds = {each["kind"] for each in manifests()}
    assert not any("Role" in kind for kind in kinds)
    (account,) = [each for each in manifests() if each["kind"] == "ServiceAccount"]
    assert account["automountServiceAccountToken"] is False is pod()["automountServiceAccountToken"]
    assert pod()["serviceAccountName"] == account["metadata"]["name"]
    assert pod()["securityContext"]["runAsNonRoot"] is True and pod()["securityContext"]["runAsUser"] > 0
    rights = container()["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True and rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}


def test_volumes_are_mounted_and_mounts_have_volumes():
    mounted = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}


def test_probes_use_existing_routes():
    served = {route.path for route in ROUTES}
    probed = {
        name: container()[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert probed == {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/ready"}
    assert set(probed.values()) <= served


def test_the_grace_period_covers_a_pause_a_drain_and_the_final_answers():
    options = cli.parser().parse_args(container()["args"])
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= pause_s + options.drain_timeout + 2 * FINAL_SEND_S


# ----------------------------------------------------------------------------------------------------------- gateway


def gateway(name: str) -> dict[str, Any]:
    (document,) = documents(DEPLOY / "gateway" / name)
    return document


def plugin_parameters(type: str) -> dict[str, Any]:
    (plugin,) = [each for each in gateway("epp-config.yaml")["plugins"] if each["type"] == type]
    return plugin["parameters"]


def test_the_endpoint_picker_reads_metrics_that_every_server_exports():
    parameters = plugin_parameters("core-metrics-extractor")
    (engine,) = parameters["engineConfigs"]
    assert parameters["defaultEngine"] == engine.pop("name")
    specs = {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "cacheInfoSpec"}
    assert set(engine) == specs and set(engine.values()) <= exported()
    assert plugin_parameters("metrics-data-source")["path"] in {route.path for route in ROUTES}


def test_the_endpoint_picker_uses_only_plugins_that_it_declares():
    config = gateway("epp-config.yaml")
    (profile,) = config["schedulingProfiles"]
    used = [each["pluginRef"] for each in profile["plugins"]]
    assert used and set(used) <= {plugin["type"] for plugin in config["plugins"]}
    assert all(each["weight"] > 0 for each in profile["plugins"])


def test_the_pool_selects_the_pods_and_their_port():
    (stateful,) = [each for each in manifests() if each["kind"] == "StatefulSet"]
    labels, (port,) = stateful["spec"]["template"]["metadata"]["labels"], container()["ports"]
    pool, servers = gateway("inferencepool.yaml")["spec"], gateway("values.yaml")["router"]["modelServers"]
    assert set(pool) == {"targetPorts", "selector", "endpointPickerRef"}  # what the schema of v1 requires
    for selected, ports in (
        (pool["selector"]["matchLabels"], pool["targetPorts"]),
        (servers["matchLabels"], servers["targetPorts"]),
    ):
        assert selected.items() <= labels.items() and ports == [{"number": port["containerPort"]}]


def test_the_documented_command_installs_the_configuration_that_the_values_name():
    named = gateway("values.yaml")["router"]["epp"]["pluginsConfigFile"].replace(".", r"\.")
    shown = (DEPLOY.parent / "docs/deployment.md").read_text()
    assert f"router.epp.pluginsCustomConfig.{named}=deploy/gateway/epp-config.yaml" in shown


# --------------------------------------------------------------------------------------------------- flags and files


def compose() -> dict[str, Any]:
    (document,) = documents(DEPLOY / "compose.yaml")
    return document


def dockerfile() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def commands() -> list[list[str]]:
    (given,) = [rest for word, rest in dockerfile() if word == "CMD"]
    return [container()["args"], compose()["services"]["headgate"]["command"], json.loads(given)]


@pytest.mark.parametrize("command", commands(), ids=["kubernetes", "compose", "docker"])
def test_flags_exist_in_the_command(command):
    options = cli.parser().parse_args(command)
    assert (options.host, options.port) == ("0.0.0.0", 8000)


def test_environment_variables_are_read_by_the_code():
    source = "".join(path.read_text() for path in (DEPLOY.parent / "src/headgate").rglob("*.py"))
    given = {variable["name"] for variable in container()["env"]} | set(
        compose()["services"]["headgate"]["environment"]
    )
    assert "HEADGATE_API_KEYS" in given and all(f'"{name}"' in source for name in given)


def test_the_dockerfile_uses_valid_instructions_and_copies_existing_files():
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in dockerfile()} == known
    sources = [name for word, rest in dockerfile() if word == "COPY" for name in shlex.split(rest)[:-1]]
    assert sources and all((DEPLOY.parent / name).exists() for name in sources)
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in sources} <= set(allowed)
    assert dict(dockerfile())["ENTRYPOINT"] == '["headgate"]'
    assert dict(dockerfile())["USER"].split(":")[0] == str(pod()["securityContext"]["runAsUser"])


def test_the_dockerfile_installs_extras_that_exist():
    (extras,) = [found[1] for _, rest in dockerfile() if (found := re.search(r"\.\[([\w,]+)\]", rest))]
    assert set(extras.split(",")) <= set(EXTRAS)


def test_compose_mounts_existing_files_and_publishes_on_loopback_only():
    document = compose()
    for service in document["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in document["volumes"], volume
    build = document["services"]["headgate"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")


def test_the_version_is_the_same_everywhere():
    assert compose()["services"]["headgate"]["image"] == f"headgate:{__version__}"
    assert f"-t headgate:{__version__} " in (DEPLOY / "Dockerfile").read_text()
