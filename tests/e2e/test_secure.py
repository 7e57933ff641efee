"""TLS between all parts, keys at the doors: real certificates, real clients, rotation."""

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import trustme

from protos import inference_pb2 as public
from protos import inference_pb2_grpc
from services.cli.main import run as kvrelay
from services.router.keys import key_line, new_key
from tests.e2e.harness import Cluster, request, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAME = "kvrelay.internal"


@dataclass
class Secured:
    """A cluster in which nothing travels in the clear, and what opens it."""

    cluster: Cluster
    authority: trustme.CA
    folder: Path
    key: str
    slow_key: str

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    @property
    def url(self) -> str:
        return f"https://{self.cluster.http_address}/v1"

    def channel(self, ca: bytes | None = None) -> grpc.Channel:
        roots = Path(self.ca).read_bytes() if ca is None else ca
        credentials = grpc.ssl_channel_credentials(roots)
        return grpc.secure_channel(self.cluster.grpc_address, credentials)

    @contextlib.contextmanager
    def client(self, key: str) -> Iterator[openai.OpenAI]:
        with httpx.Client(verify=self.context) as http:
            yield openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, http_client=http)

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)


def write_pair(authority: trustme.CA, folder: Path, name: str, *hosts: str) -> list[str]:
    issued = authority.issue_cert(*hosts)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return [str(cert), str(key)]


@pytest.fixture(scope="module")
def secured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    cert, key = write_pair(authority, folder, "public", "127.0.0.1", "localhost")
    inner_cert, inner_key = write_pair(authority, folder, "inner", NAME)
    keys = [new_key(), new_key()]
    lines = [key_line("all", keys[0]), key_line("slow", keys[1], streams=1, per_minute=2)]
    (folder / "keys").write_text("\n".join(lines))
    patched = pytest.MonkeyPatch()
    patched.setenv("KVRELAY_CLUSTER_TOKEN", "for tests")
    options = [
        *("--tls-cert", cert, "--tls-key", key, "--api-keys", str(folder / "keys")),
        *("--internal-tls-cert", inner_cert, "--internal-tls-key", inner_key),
        *("--internal-tls-ca", str(folder / "ca.pem"), "--internal-tls-name", NAME),
        *("--disaggregate-from", "0", "--dtype", "float32", "--kv-cache-bytes", "64MiB"),
        *("--transport", "grpc"),  # so that KV travels through TLS, too
    ]
    with serve(str(tiny_model), *options) as running:
        yield Secured(running, authority, folder, *keys)
    patched.undo()


def generate(channel: grpc.Channel, key: str = "") -> public.Finished:
    stub = inference_pb2_grpc.InferenceStub(channel)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    asked = request(ids=list(range(60)), max_tokens=5, ignore_eos=True)
    return list(stub.Generate(asked, metadata=metadata, timeout=30))[-1].finished


def test_an_answer_travels_encrypted_through_every_part(secured: Secured) -> None:
    with secured.channel() as channel:
        finished = generate(channel, secured.key)
    assert finished.usage.output_tokens == 5
    assert finished.timeline.handoff_bytes > 0
    with secured.client(secured.key) as client:
        answer = client.completions.create(
            model="tiny", prompt="hello there", max_tokens=4, temperature=0
        )
    assert answer.usage is not None and answer.usage.completion_tokens <= 4


@pytest.mark.parametrize("key", ["", "kvr_wrong"])
def test_without_a_key_nothing_but_health(secured: Secured, key: str) -> None:
    with secured.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        generate(channel, key)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    refusal = pytest.raises(openai.AuthenticationError, match="API key")
    with secured.client(key or "none") as client, refusal:
        client.models.list()
    base = secured.url.removesuffix("/v1")
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(base + path, verify=secured.context).status_code == 200


def test_plain_text_and_strange_authorities_get_nowhere(secured: Secured) -> None:
    with grpc.insecure_channel(secured.cluster.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            generate(channel, secured.key)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    stranger = trustme.CA().cert_pem.bytes()
    with secured.channel(stranger) as channel, pytest.raises(grpc.RpcError):
        generate(channel, secured.key)
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.url.replace("https", "http") + "/models")


def test_the_internal_ports_want_a_certificate(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cluster token alone does not open them."""
    monkeypatch.setenv("KVRELAY_TLS_CA", secured.ca)
    monkeypatch.setenv("KVRELAY_API_KEY", secured.key)
    address = secured.cluster.grpc_address
    with secured.channel() as channel:
        name = generate(channel, secured.key).timeline.decode_instance
    assert kvrelay(["status", "--address", address]) == 0
    monkeypatch.setenv("KVRELAY_INTERNAL_TLS_CA", secured.ca)
    monkeypatch.setenv("KVRELAY_INTERNAL_TLS_NAME", NAME)
    capsys.readouterr()
    assert kvrelay(["drain", name, "--address", address]) == 1
    assert "nobody answers" in capsys.readouterr().err
    for part in ("CERT", "KEY"):
        file = secured.folder / ("inner.pem" if part == "CERT" else "inner.key")
        monkeypatch.setenv(f"KVRELAY_INTERNAL_TLS_{part}", str(file))
    assert kvrelay(["drain", name, "--address", address]) == 0
    assert kvrelay(["undrain", name, "--address", address]) == 0


def test_a_key_keeps_to_its_limits(secured: Secured) -> None:
    with secured.channel() as channel:
        for _ in range(2):
            generate(channel, secured.slow_key)
        with pytest.raises(grpc.RpcError, match="2 requests a minute") as refused:
            generate(channel, secured.slow_key)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(refused.value.trailing_metadata())["retry-after-ms"]) > 1000
        generate(channel, secured.key)  # nobody else is
    with (
        secured.client(secured.slow_key) as client,
        pytest.raises(openai.RateLimitError) as limited,
    ):
        client.models.list()
    assert int(limited.value.response.headers["retry-after"]) >= 1


def test_certificates_are_rotated_while_it_serves(secured: Secured) -> None:
    authority = trustme.CA()
    write_pair(authority, secured.folder, "public", "127.0.0.1", "localhost")
    fresh = authority.cert_pem.bytes()
    with secured.channel(fresh) as channel:
        assert generate(channel, secured.key).usage.output_tokens == 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--host", "0.0.0.0"), "without encryption or keys: give it --tls-cert and --api-keys"),
        (("--tls-cert", __file__), "--tls-key: a certificate and its key go together"),
        (("--tls-cert", "/none", "--tls-key", "/none"), "--tls-cert: there is no file /none"),
        (("--tls-cert", __file__, "--tls-key", __file__), "are no pair"),
        (("--api-keys", os.devnull + "x"), "--api-keys: cannot read"),
    ],
)
def test_what_cannot_be_safe_does_not_start(
    tiny_model: Path,
    options: tuple[str, ...],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvrelay(["serve", str(tiny_model), *options]) == 1
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1
