"""The command line as a client: one request to a running router, streamed, and its status.

Knows the public protos, no rendering. Used by ``generate``, ``status`` and ``demo``.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.runtime.certificates import TlsFiles
from services.runtime.errors import Unavailable
from services.runtime.tls import channel_credentials

API_KEY_VARIABLE = "KVRELAY_API_KEY"
TLS_CA_VARIABLE = "KVRELAY_TLS_CA"
TLS_CERT_VARIABLE = "KVRELAY_TLS_CERT"
TLS_KEY_VARIABLE = "KVRELAY_TLS_KEY"
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Answer:
    """What a Generate stream has said so far."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        usage, timeline = self.finished.usage, self.finished.timeline
        reason = inference_pb2.FinishReason.Name(self.finished.finish_reason)
        return {
            "request_id": self.request_id,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": reason.removeprefix("FINISH_REASON_").lower(),
            "stop_reason": self.finished.stop_reason,
            "usage": {each.name: getattr(usage, each.name) for each in usage.DESCRIPTOR.fields},
            "timeline": {
                each.name: getattr(timeline, each.name) for each in timeline.DESCRIPTOR.fields
            },
        }


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a router's public port.

    Raises:
        Unavailable: nobody answers there.
    """
    # A proxy that the environment names for the web knows no way to a cluster.
    options = (("grpc.enable_http_proxy", 0),)
    async with _channel(address, options) as channel:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await _connect(channel)
        except (TimeoutError, ConnectionError):
            raise Unavailable(
                f"nobody answers at {address}: start a cluster with kvrelay serve, "
                "or say where it is with --address"
            ) from None
        yield channel


def _channel(address: str, options: Any) -> grpc.aio.Channel:
    """Encrypted, if the environment names who may have signed the router's certificate."""
    files = TlsFiles(
        os.environ.get(TLS_CERT_VARIABLE, ""),
        os.environ.get(TLS_KEY_VARIABLE, ""),
        os.environ.get(TLS_CA_VARIABLE, ""),
    )
    credentials = channel_credentials(files)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def key_metadata() -> tuple[tuple[str, str], ...]:
    """The API key of the environment, as calls carry it."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return (("authorization", f"Bearer {key}"),) if key else ()


async def _connect(channel: grpc.aio.Channel) -> None:
    """Unlike ``channel_ready``, does not go on trying where nobody listens."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise ConnectionError
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def generate(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, answer: Answer
) -> AsyncIterator[str]:
    """Text as it comes; ``answer`` grows along. Leaving the iteration cancels the request.

    Raises:
        grpc.aio.AioRpcError: the request was refused or has failed.
    """
    call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=key_metadata())
    try:
        async for response in call:
            answer.request_id = response.request_id
            match response.WhichOneof("event"):
                case "tokens":
                    answer.token_ids.extend(response.tokens.token_ids)
                    answer.text += response.tokens.text
                    yield response.tokens.text
                case "finished":
                    answer.finished = response.finished
    finally:
        call.cancel()


async def cluster_status(channel: grpc.aio.Channel) -> dict[str, Any]:
    """The model and the instances, by the names of ``kvrelay status --json``.

    Raises:
        grpc.aio.AioRpcError: no answer.
    """
    stub = cluster_pb2_grpc.StatusStub(channel)
    status = await stub.GetStatus(
        cluster_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S, metadata=key_metadata()
    )
    return {"model": status.model, "instances": [_instance(each) for each in status.instances]}


LOAD_FIELDS = (
    *("blocks_total", "blocks_free", "blocks_cached", "blocks_held", "blocks_quarantined"),
    *("requests_running", "requests_waiting", "handoffs_active"),
)


def _instance(instance: cluster_pb2.InstanceStatus) -> dict[str, Any]:
    return {
        "instance_id": instance.instance_id,
        "role": cluster_pb2.Role.Name(instance.role).removeprefix("ROLE_").lower(),
        "address": instance.address,
        "state": instance.state,
        **{name: getattr(instance.load, name) for name in LOAD_FIELDS},
    }
