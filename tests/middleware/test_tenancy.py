"""The tenant follows from the checked key and from nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers

from sam_connector.middleware.tenancy import TENANT_LENGTH, Tenancy


class AuthenticationMiddleware:
    """Has the name of vLLM's."""

    def __init__(self, app: object) -> None: ...


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def tenancy(api_key: list[str] | None = None, *, check: bool = False) -> Tenancy:
    app = Starlette()
    app.state.args = SimpleNamespace(api_key=api_key)
    if check:
        app.add_middleware(AuthenticationMiddleware)  # type: ignore[arg-type]
    return Tenancy(app)


def bearer(key: str, **others: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}", **others})


def test_without_a_check_there_is_one_tenant() -> None:
    assert not tenancy().enforced
    assert tenancy().tenant_of(bearer("k")) == ""
    assert tenancy([""]).tenant_of(bearer("k")) == ""
    assert Tenancy(Starlette()).tenant_of(bearer("k")) == ""


def test_each_sign_of_a_check_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tenancy(["k"]).enforced
    assert tenancy(check=True).enforced
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert tenancy().enforced


def test_a_key_is_a_tenant_and_not_readable_from_it() -> None:
    tenants = tenancy(["k1", "k2"])
    first, second = (tenants.tenant_of(bearer(key)) for key in ("k1", "k2"))
    assert first != second
    assert first == tenants.tenant_of(Headers({"authorization": "bearer k1"}))
    assert len(first) == TENANT_LENGTH
    assert "k1" not in first


def test_another_header_does_not_change_a_checked_tenant() -> None:
    tenants = tenancy(["k1"])
    spoofed = bearer("k1", **{"x-api-key": "k2"})
    assert tenants.tenant_of(spoofed) == tenants.tenant_of(bearer("k1"))


def test_x_api_key_counts_where_there_is_no_bearer() -> None:
    tenants = tenancy(check=True)
    by_header = tenants.tenant_of(Headers({"x-api-key": "k1"}))
    assert by_header == tenants.tenant_of(bearer("k1"))
    basic = Headers({"authorization": "Basic abc", "x-api-key": "k1"})
    assert tenants.tenant_of(basic) == by_header


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic abc"])
def test_no_key_is_no_tenant(value: str) -> None:
    assert tenancy(["k"]).tenant_of(Headers({"authorization": value})) == ""


def test_a_key_of_any_bytes_is_a_tenant() -> None:
    assert tenancy(["k"]).tenant_of(bearer("schlüssel"))
