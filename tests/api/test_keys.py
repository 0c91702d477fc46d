"""Access control by API keys."""

from __future__ import annotations

import pytest

from headgate.contract.access import DECLARED
from headgate.contract.errors import Forbidden, Unauthorized
from headgate.contract.keys import Caller, Keys, is_loopback, parse_keys, presented, read_keys
from headgate.contract.operations.operation import Access
from headgate.errors import RequestError

CHAT = "/v1/chat/completions"
PAUSE = "/v1/pause"


def declared(access: Access) -> list[str]:
    return [path for path, declared in DECLARED.items() if declared is access]


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.fixture
def keys() -> Keys:
    return Keys({"alice": "ka", "bob": "kb"}, admin="root")


def test_each_key_is_a_tenant(keys):
    assert keys.caller(CHAT, bearer("ka")) == Caller("alice", admin=False)
    assert keys.caller(CHAT, bearer("kb")) == Caller("bob", admin=False)
    assert keys.caller(CHAT, bearer("root")) == Caller("admin", admin=True)


def test_either_header_carries_a_key_and_authorization_wins(keys):
    other = [(b"x-api-key", b"kb")]
    assert keys.caller(CHAT, other).tenant == "bob"
    assert keys.caller(CHAT, [*other, *bearer("ka")]).tenant == "alice"
    assert presented([(b"authorization", b"Basic abc")]) is None
    assert presented([(b"authorization", b"bearer  x ")]) == "x"


@pytest.mark.parametrize("wrong", ["", "k", "ka ", "kaa", "KA", "ka\xff"])
def test_a_wrong_key_is_refused(keys, wrong):
    headers = [(b"x-api-key", wrong.encode("latin-1"))]
    if wrong.strip() == "ka":
        assert keys.caller(CHAT, headers).tenant == "alice"  # spaces around a header's value are ignored
        return
    with pytest.raises(Unauthorized):
        keys.caller(CHAT, headers)


def test_no_key_is_refused_except_for_probes(keys):
    with pytest.raises(Unauthorized) as refusal:
        keys.caller(CHAT, [])
    assert refusal.value.code == "missing_api_key"
    for path in declared(Access.OPEN):
        assert keys.caller(path, []) == Caller("", admin=False)


def acting(tenant: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-headgate-tenant", tenant.encode())]


def test_11_the_admin_may_act_as_any_tenant_and_then_has_no_admin_rights(keys):
    for name in ("alice", "carol", "jürgen"):
        assert keys.caller(CHAT, [*bearer("root"), *acting(name)]) == Caller(name, admin=False)
    with pytest.raises(Forbidden):
        keys.caller(PAUSE, [*bearer("root"), *acting("alice")])


def test_only_the_admin_may_act_as_a_tenant(keys):
    for caller in (bearer("ka"), bearer("kb")):
        with pytest.raises(Forbidden):
            keys.caller(CHAT, [*caller, *acting("alice")])
    with pytest.raises(Unauthorized):
        keys.caller(CHAT, acting("alice"))
    with pytest.raises(Forbidden):
        Keys(exposed=True).caller(CHAT, acting("alice"))
    # Without keys, and if only this machine can connect, any caller is an admin, and may act as a tenant.
    assert Keys().caller(CHAT, acting("alice")) == Caller("alice", admin=False)


@pytest.mark.parametrize("name", [b"a:b", b"a\tb", b"\xff", b"x" * 257])
def test_an_invalid_tenant_name_is_refused(keys, name):
    with pytest.raises(RequestError) as refusal:
        keys.caller(CHAT, [*bearer("root"), (b"x-headgate-tenant", name)])
    assert refusal.value.param == "X-Headgate-Tenant"


@pytest.mark.parametrize("path", [*declared(Access.ADMIN), "/v1/pause/", "/v1/update_weights/x"])
def test_control_calls_are_refused_to_tenants_and_allowed_to_the_admin(keys, path):
    assert keys.caller(path, bearer("root")).admin
    with pytest.raises(Forbidden):
        keys.caller(path, bearer("ka"))


@pytest.mark.parametrize(
    "path", ["/v1/pauses", "//", "", "/v1/modelsx", "/v1//models", "/v1/chat", "/LIVE", "/live/x"]
)
def test_an_undeclared_path_requires_the_admin_key(keys, path):
    assert keys.caller(path, bearer("root")).admin
    with pytest.raises(Forbidden):
        keys.caller(path, bearer("ka"))
    with pytest.raises(Unauthorized):
        keys.caller(path, [])


def test_67_an_empty_tenant_name_removes_admin_rights_and_changes_nothing_else(keys):
    assert keys.caller(CHAT, [*bearer("root"), *acting("")]) == Caller("", admin=False)
    assert keys.caller(CHAT, [*bearer("ka"), *acting("")]) == Caller("alice", admin=False)
    with pytest.raises(Forbidden):
        keys.caller(PAUSE, [*bearer("root"), *acting("")])
    with pytest.raises(Unauthorized):
        keys.caller(CHAT, acting(""))
    for open_to_all in (Keys(), Keys(exposed=True), Keys(admin="root")):
        assert open_to_all.caller(CHAT, acting("")) == Caller("", admin=False)


def test_66_a_server_with_a_worker_key_refuses_callers_without_a_key():
    keys = Keys(admin="root", worker="work")
    for path in (CHAT, PAUSE, "/v1/models"):
        for headers in ([], bearer("wrong"), acting("alice")):
            with pytest.raises(Unauthorized):
                keys.caller(path, headers)
    assert keys.caller("/health", []) == Caller("", admin=False)
    assert keys.caller(PAUSE, bearer("work")).admin and keys.caller(PAUSE, bearer("root")).admin
    assert keys.caller(CHAT, [*bearer("work"), *acting("alice")]) == Caller("alice", admin=False)
    assert Keys(worker="work", exposed=True).warning is None
    assert Keys(admin="same", worker="same").caller(PAUSE, bearer("same")).admin


def test_without_keys_this_machine_may_do_everything():
    assert Keys().caller(PAUSE, []) == Caller("", admin=True)
    assert Keys().warning is None


def test_without_keys_an_exposed_server_refuses_control_and_warns():
    keys = Keys(exposed=True)
    assert keys.caller(CHAT, []) == Caller("", admin=False)
    with pytest.raises(Forbidden, match="--admin-key"):
        keys.caller(PAUSE, [])
    assert "control calls are refused" in keys.warning


def test_with_tenant_keys_alone_control_calls_are_refused():
    keys = Keys({"alice": "ka"}, exposed=True)
    with pytest.raises(Forbidden, match="--admin-key"):
        keys.caller(PAUSE, bearer("ka"))
    assert keys.warning is None


def test_with_an_admin_key_alone_generation_is_open_and_control_is_not():
    keys = Keys(admin="root")
    assert keys.caller(CHAT, []) == Caller("", admin=False)
    assert keys.caller(PAUSE, bearer("root")).admin
    with pytest.raises(Forbidden):
        keys.caller(PAUSE, [])


OWN = [(b"host", b"127.0.0.1:8000")]


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        [(b"host", b"localhost:8000")],
        [(b"host", b"[::1]:8000")],
        [*OWN, (b"origin", b"http://127.0.0.1:8000"), (b"sec-fetch-site", b"same-origin")],  # a page of ours
        [*OWN, (b"sec-fetch-site", b"none")],  # typed into the address bar
    ],
)
def test_without_keys_programs_and_pages_of_this_machine_control_the_server(headers):
    assert Keys().caller(PAUSE, headers).admin


@pytest.mark.parametrize(
    "headers",
    [
        [*OWN, (b"origin", b"https://evil.example")],
        [*OWN, (b"origin", b"http://127.0.0.1:3000")],  # another server of this machine
        [*OWN, (b"origin", b"null")],
        [*OWN, (b"sec-fetch-site", b"cross-site")],  # an image
        [(b"host", b"evil.example:8000")],  # a foreign name that resolves to this machine
        [(b"host", b"evil.example:8000"), (b"origin", b"http://evil.example:8000")],
        [(b"host", b"[::1")],
        [(b"origin", b"http://127.0.0.1:8000")],
    ],
)
def test_without_keys_a_web_page_of_another_site_is_refused_control(headers):
    with pytest.raises(Forbidden, match="Origin or Host"):
        Keys().caller(PAUSE, headers)
    assert Keys().caller(CHAT, headers) == Caller("", admin=False)
    assert Keys(admin="root").caller(PAUSE, [*headers, *bearer("root")]).admin  # a browser cannot know a key


def test_two_names_for_one_key_are_refused():
    with pytest.raises(RequestError, match="same API key"):
        Keys({"a": "k", "b": "k"})
    with pytest.raises(RequestError, match="same API key"):
        Keys({"a": "k"}, admin="k")


def test_keys_stay_out_of_the_repr(keys):
    assert "ka" not in repr(keys) and "root" not in repr(keys)


def test_keys_are_read_from_lines_commas_or_json(tmp_path):
    expected = {"alice": "k:1", "bob": "k2"}
    assert parse_keys("# people\nalice:k:1\n\n bob : k2 \n", "x") == expected
    assert parse_keys("alice:k:1,bob:k2", "x") == expected
    file = tmp_path / "keys"
    file.write_text('{"alice": "k:1", "bob": "k2"}')
    assert read_keys(file) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# none",
        "alice",
        "alice:",
        ":k",
        "a:1\na:2",
        "admin:1",
        "a:ü",
        "{}",
        '{"a:b": "k"}',
        '{"a": 1}',
        '{"a": ""}',
        "{",
    ],
)
def test_invalid_keys_are_refused_with_the_name_of_their_file(text):
    with pytest.raises(RequestError, match="the-file"):
        parse_keys(text, "the-file")


def test_a_missing_key_file_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_key_file_that_is_not_text_is_reported_in_one_sentence(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"alice:\xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_keys(file)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.8.8.8", True), ("0.0.0.0", False), ("::", False)],
)
def test_what_counts_as_this_machine(host, loopback):
    assert is_loopback(host) == loopback
