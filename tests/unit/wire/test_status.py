"""An error that crosses a call is the same error: class, message, hint, retryable and fields."""

import asyncio
from concurrent import futures

import grpc
import pytest

from ferrorpc import errors
from ferrorpc.errors import ErrorCode, FerroError, type_of
from ferrorpc.v1 import error_pb2
from ferrorpc.wire.error_detail import detail_of, restore
from ferrorpc.wire.options import data_channel
from ferrorpc.wire.status import STATUS_OF, TRAILER, TRAILER_BYTES_MAX, error_of, to_status

SAMPLES = [
    errors.PeerLostError(2, "signal 9"),
    errors.CollectiveMismatchError({0: "all_reduce()", 3: "broadcast()"}),
    errors.BarrierTimeoutError([1, 3], "a barrier waited for 5 s"),
    errors.RendezvousTimeoutError(["node-1", "node-2"], "two are missing"),
    errors.CollectiveTimeoutError([], "nobody is missing"),
    errors.GroupAbortedError(1, "ValueError: é"),
    errors.BackendUnavailableError("no GPU", "use grpc"),
    errors.LimitExceededError("too much", retryable=True, limit="keys", most=3, ratio=0.5, soft=False),
    errors.ConfigError("bad", hint=""),
    FerroError("a bug"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_a_detail_restores_the_same_error(error: FerroError) -> None:
    back = restore(error_pb2.ErrorDetail.FromString(detail_of(error).SerializeToString()))
    assert type(back) is type(error)
    assert (back.message, back.hint, back.retryable, back.fields) == (error.message, error.hint, error.retryable, error.fields)


ESCAPES = "\x1b]0;title\x07\x1b[2J\r\x9b\u202e"
SHOWN = r"\x1b]0;title\x07\x1b[2J\r\x9b\u202e"


def test_a_text_of_another_process_neither_controls_the_terminal_nor_passes_for_a_line_of_this_one() -> None:
    error = errors.PeerLostError(1, f"{ESCAPES}\nit", f"lost: é{ESCAPES}\nferrorpc: all is well\n    indented")
    back = restore(detail_of(error))
    assert back.message == f"lost: é{SHOWN}\n    ferrorpc: all is well\n    indented"
    assert back.fields == {"rank": 1, "reason": f"{SHOWN}\nit"}
    assert str(restore(detail_of(back))) == str(back), "an error may come through several processes"
    mismatch = restore(detail_of(errors.CollectiveMismatchError({0: ESCAPES}, "m", names=[ESCAPES])))
    assert mismatch.fields == {"signatures": {0: SHOWN}, "names": [SHOWN]}


def test_a_hint_of_several_lines_stays_as_it_is() -> None:
    hint = "look at\n  the first line\nthe second"
    assert restore(detail_of(errors.ConfigError("bad", hint=hint))).hint == hint
    assert restore(detail_of(errors.ConfigError("bad", hint=ESCAPES))).hint == SHOWN


def test_a_number_too_large_for_the_wire_travels_as_text() -> None:
    most = 1 << 63
    back = restore(detail_of(errors.LimitExceededError("too much", most=most, least=-most, several=[1, most])))
    assert back.fields == {"most": str(most), "least": -most, "several": ["1", str(most)]}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_has_a_status(code: ErrorCode) -> None:
    error = FerroError.restore(code, "m", "h", False, {"rank": 1})
    status, text, trailers = to_status(error)
    assert status is STATUS_OF[code] is not grpc.StatusCode.OK
    assert text == "m"
    assert restore(error_pb2.ErrorDetail.FromString(dict(trailers)[TRAILER])).code == code


def test_a_code_of_a_newer_version_gives_the_root_class() -> None:
    detail = error_pb2.ErrorDetail(code=4000, message="from the future", hint="wait")  # type: ignore[arg-type]
    assert type(restore(detail)) is FerroError


@pytest.mark.parametrize(
    "long",
    [
        errors.CollectiveMismatchError(dict.fromkeys(range(100), "x" * 400)),
        errors.LimitExceededError("x" * TRAILER_BYTES_MAX, hint="y" * TRAILER_BYTES_MAX, retryable=True),
        errors.LimitExceededError("x" * TRAILER_BYTES_MAX, hint="", retryable=True),
    ],
    ids=["fields", "hint", "message"],
)
def test_an_error_too_long_for_metadata_is_shortened_and_keeps_its_class(long: FerroError) -> None:
    _, text, trailers = to_status(long)
    data = dict(trailers)[TRAILER]
    assert len(data) <= TRAILER_BYTES_MAX
    assert len(text) <= 512
    back = restore(error_pb2.ErrorDetail.FromString(data))
    assert (type(back), back.retryable) == (type(long), long.retryable)


class Failing(grpc.GenericRpcHandler):
    """Answers every call with the sample of that number; -1 is a foreign status."""

    def service(self, details):
        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            number = int(request)
            if number < 0:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "foreign")
            status, text, trailers = to_status(SAMPLES[number])
            context.set_trailing_metadata(trailers)
            context.abort(status, text)

        return grpc.unary_unary_rpc_method_handler(handle)


@pytest.fixture(scope="module")
def address():
    pool = futures.ThreadPoolExecutor(2)
    server = grpc.server(pool, handlers=[Failing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(5)
    pool.shutdown()


@pytest.mark.parametrize("number", range(-1, len(SAMPLES)))
def test_an_error_comes_out_of_a_call_as_it_went_in(address: str, number: int) -> None:
    with grpc.insecure_channel(address, options=data_channel()) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/any/Call")(str(number).encode(), timeout=10)
    check(error_of(raised.value, "the server"), number)


def test_an_error_comes_out_of_an_asyncio_call_as_it_went_in(address: str) -> None:
    async def call(number: int) -> FerroError:
        async with grpc.aio.insecure_channel(address, options=data_channel()) as channel:
            try:
                await channel.unary_unary("/any/Call")(str(number).encode(), timeout=10)
            except grpc.RpcError as error:
                return error_of(error, "the server")
        raise AssertionError("the call went well")

    for number in (-1, 0, 1):
        check(asyncio.run(call(number)), number)


def check(error: FerroError, number: int) -> None:
    if number < 0:
        assert type(error) is errors.LimitExceededError
        assert "the server refused a message over its limit (RESOURCE_EXHAUSTED: foreign)" in error.message
        return
    assert type(error) is type(SAMPLES[number])
    assert error.fields == SAMPLES[number].fields


def test_nobody_at_the_address_is_unavailable() -> None:
    with grpc.insecure_channel("127.0.0.1:1", options=data_channel()) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/any/Call")(b"", timeout=10)
    error = error_of(raised.value, "the coordinator at 127.0.0.1:1")
    assert type(error) is errors.CoordinatorUnavailableError
    assert error.message.startswith("the coordinator at 127.0.0.1:1 cannot be reached (UNAVAILABLE")


def test_a_bare_rpc_error_means_that_the_caller_went_away() -> None:
    assert isinstance(error_of(grpc.RpcError()), errors.CoordinatorUnavailableError)


def test_a_server_that_answers_by_http_status_404_speaks_another_protocol_not_another_version() -> None:
    """A proxy or an ingress does so while what is behind it is away; gRPC takes that for a call that is not known."""

    class NotFound(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNIMPLEMENTED

        def details(self) -> str:
            return "Received http2 header with status: 404"

    error = error_of(NotFound(), "the coordinator at gate:443")
    assert type(error) is errors.CoordinatorUnavailableError
    assert error.retryable
    assert error.message.startswith("the coordinator at gate:443 cannot be reached: a proxy or another HTTP server answers")


def test_a_trailer_that_is_none_of_ours_leaves_what_grpc_says() -> None:
    class Strange(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.PERMISSION_DENIED

        def details(self) -> str:
            return "not here"

        def trailing_metadata(self) -> list[tuple[str, bytes]]:
            return [("other", b""), (TRAILER, b"\xff")]

    error = error_of(Strange(), "a proxy")
    assert type(error) is errors.PermissionDeniedError
    assert error.message == "a proxy does not permit this (PERMISSION_DENIED: not here)"


def test_every_class_of_the_tree_has_a_code_on_the_wire() -> None:
    numbers = {value for name, value in error_pb2.ErrorCode.items() if name != "ERROR_CODE_UNSPECIFIED"}
    assert numbers == {int(code) for code in type_of}
