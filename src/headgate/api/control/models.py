"""GET /v1/models: the one model that is served."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.generate.serve import check_model
from headgate.api.state import Api, api_of
from headgate.contract.status import ModelEntry, ModelList


async def list_models(request: Request) -> Response:
    return _answer(ModelList(data=[_model(api_of(request))]))


async def show_model(request: Request) -> Response:
    api = api_of(request)
    check_model(api, request.path_params["model"])
    return _answer(_model(api))


def _model(api: Api) -> ModelEntry:
    return ModelEntry(id=api.model_name, created=api.created, max_model_len=api.engines.info.max_context)


def _answer(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
