"""From an HTTP request to a running generation: read, validate, tokenise, hand over."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from fastapi import Request
from starlette.responses import Response

from eagle2.protocol import GenerationRequest
from eagle2.router.body import parse_body, read_body
from eagle2.router.destinations import Route
from eagle2.router.failover import RoutedVerifier
from eagle2.router.identity import generation_id_of
from eagle2.router.model import ModelSource, ServedModel
from eagle2.router.parameters import deadline_of, priority_of, sampling_params, stop_conditions
from eagle2.router.quotas import Quotas
from eagle2.router.replies import ChatShape, CompletionShape, ReplyShape
from eagle2.router.reply import GenerationReply
from eagle2.router.schemas import ChatBody, CompletionBody
from eagle2.router.settings import RouterSettings
from eagle2.router.tenants import Caller
from eagle2.router.workers import BodyWorkers
from eagle2.session.session import HEADER, prefix_fingerprints, session_of
from eagle2.telemetry.recorder import Recorder


class Generations:
    """Answers the two POST endpoints."""

    def __init__(
        self,
        verifier: RoutedVerifier,
        models: ModelSource,
        settings: RouterSettings,
        recorder: Recorder,
        quotas: Quotas,
        *,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._verifier = verifier
        self._models = models
        self._settings = settings
        self._recorder = recorder
        self._quotas = quotas
        self._draw_seed = draw_seed
        self._clock = clock
        self._workers = BodyWorkers(settings)

    def close(self) -> None:
        """Let the worker threads end."""
        self._workers.close()

    async def answer(self, request: Request, schema: type[ChatBody] | type[CompletionBody], endpoint: str) -> Response:
        """The reply of one generation. Raises RequestError, UnavailableError or ClientDisconnect."""
        caller: Caller = request.state.caller
        request.state.reply_headers.update(await self._quotas.take_request(caller))
        body, model, generation, route = await self._read(request, schema)
        request.state.reply_headers.update(await self._quotas.take_prompt(caller, len(generation.prompt_ids)))
        return GenerationReply(
            lambda: self._quotas.metered(caller, self._verifier.generate(generation, route)),
            generation.request_id,
            self._shape(body, model, generation),
            stream=body.stream,
            include_usage=body.stream_options.include_usage,
            endpoint=endpoint,
            settings=self._settings,
            recorder=self._recorder,
        )

    async def _read(
        self, request: Request, schema: type[ChatBody] | type[CompletionBody]
    ) -> tuple[ChatBody | CompletionBody, ServedModel, GenerationRequest, Route]:
        raw = await read_body(request.receive, request.headers, self._settings)
        model = await self._models.get()
        # In one go: a parsed body takes many times its bytes, and many would pile up between two steps.
        work = partial(self._prepare, request, schema, raw, model)
        body, generation, route = await self._workers.run(len(raw), work)
        return body, model, generation, route

    def _prepare(
        self, request: Request, schema: type[ChatBody] | type[CompletionBody], raw: bytes, model: ServedModel
    ) -> tuple[ChatBody | CompletionBody, GenerationRequest, Route]:
        body = parse_body(schema, raw)
        model.check_name(body.model)
        tenant = request.state.caller.tenant
        session = session_of(
            tenant,
            header=request.headers.get(HEADER),
            session_id=body.session_id,
            prompt_cache_key=body.prompt_cache_key,
            user=body.user,
            messages=[(message.role, message.text) for message in getattr(body, "messages", ())],
        )
        sampling = sampling_params(body, model.description.vocab_size, self._draw_seed)
        prompt_ids = model.prompt_ids(body, self._settings.max_prompt_tokens)
        generation = GenerationRequest(
            request_id=generation_id_of(request.state.request_id),
            tenant=tenant,
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop=stop_conditions(body, prompt_ids, model.description, self._settings.default_max_tokens),
            speculation=body.speculation,
            deadline=deadline_of(body, self._settings.request_timeout_s, self._clock()),
            priority=priority_of(body),
        )
        return body, generation, Route(session, prefix_fingerprints(tenant, prompt_ids))

    def _shape(self, body: ChatBody | CompletionBody, model: ServedModel, generation: GenerationRequest) -> ReplyShape:
        shape, prefix = (ChatShape, "chatcmpl") if isinstance(body, ChatBody) else (CompletionShape, "cmpl")
        return shape(
            id=f"{prefix}-{generation.request_id}",
            created=int(self._clock()),
            model=model.name,
            include_usage=body.stream and body.stream_options.include_usage,
            prompt_ids=generation.prompt_ids if body.return_token_ids else None,
        )
