"""Prometheus metrics. Labels come from fixed sets (routes, statuses, the served name), never from
requests.
"""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.engine.messages import Heartbeat
from loraplex.server.engine_api import Engine

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters and histograms of one server, in a registry of their own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        disable_created_metrics()  # a second series for each first one, of no use to anybody here
        self.registry = registry = CollectorRegistry()
        self._engine = engine
        self.requests = Counter(
            "loraplex:requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self.prompt_tokens = Counter("loraplex:prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self.cached_tokens = Counter(
            "loraplex:cached_tokens", "Prompt tokens taken from the prefix cache", registry=registry
        )
        self.generation_tokens = Counter("loraplex:generation_tokens", "Tokens generated", registry=registry)
        self.first_token = Histogram(
            "loraplex:time_to_first_token_seconds",
            "Request body read to first output",
            buckets=_SLOW_S,
            registry=registry,
        )
        self.inter_token = Histogram(
            "loraplex:inter_token_latency_seconds",
            "Time per token after the first, of one choice",
            buckets=_FAST_S,
            registry=registry,
        )
        self.end_to_end = Histogram(
            "loraplex:e2e_request_latency_seconds",
            "Request body read to last output",
            buckets=_SLOW_S,
            registry=registry,
        )
        self._beat_gauge("loraplex:num_running", "Sequences running", "num_running")
        self._beat_gauge("loraplex:num_waiting", "Sequences waiting", "num_waiting")
        self._beat_gauge("loraplex:kv_used_tokens", "KV pool tokens held by running sequences", "kv_used_tokens")
        self._beat_gauge("loraplex:kv_cached_tokens", "KV pool tokens kept as prefix cache", "kv_cached_tokens")
        registry.register(_Preemptions(engine))
        self._beat_gauge("vllm:num_requests_running", "Sequences running", "num_running", model_name)
        self._beat_gauge("vllm:num_requests_waiting", "Sequences waiting", "num_waiting", model_name)
        adapters = Gauge("loraplex:num_adapters", "Adapters that answer requests", registry=registry)
        adapters.set_function(lambda: len(engine.adapters))

    def _beat_gauge(self, name: str, help: str, field: str, model_name: str | None = None) -> None:
        """A gauge that reads `field` of the engine's last heartbeat when scraped."""
        if model_name is None:
            gauge = Gauge(name, help, registry=self.registry)
        else:
            gauge = Gauge(name, help, ["model_name"], registry=self.registry).labels(model_name)
        gauge.set_function(lambda: _beat_value(self._engine.last_heartbeat, field))

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


def _beat_value(beat: Heartbeat | None, field: str) -> float:
    return 0.0 if beat is None else float(getattr(beat, field))


class _Preemptions(Collector):
    """A counter that the engine keeps: its last heartbeat is read when scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        value = _beat_value(self._engine.last_heartbeat, "preemptions")
        yield CounterMetricFamily("loraplex:preemptions", "Sequences preempted and computed again", value=value)


class CountRequests:
    """ASGI middleware: counts answers by route and status. What matches no route counts as `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = getattr(scope.get("route"), "path_format", "other")
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        return await self._app(scope, receive, counting_send)
