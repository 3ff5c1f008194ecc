"""Bytes that are no message are a CodecError with both implementations of protobuf."""

import importlib.util
import os
import subprocess
import sys

import pytest

# A process has one implementation, which it chooses at protobuf's import.
PARSES_BAD_BYTES = """
from google.protobuf.internal import api_implementation
from ferrorpc.errors import CodecError
from ferrorpc.transports.grpc.incoming_stream import read_message
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.parse import parse

NO_UTF8 = transport_pb2.DataMessage(open=transport_pb2.Open(job="abc")).SerializeToString().replace(b"abc", b"a\\xffc")
NO_FIELD = b"\\xff\\xff"
for data in (NO_UTF8, NO_FIELD):
    for attempt in (lambda: parse(transport_pb2.DataMessage, data, "no message of ours"), lambda: read_message(data, 3)):
        try:
            attempt()
        except CodecError as error:
            assert "no message of ours" in error.message
            assert error.__cause__ is None
        else:
            raise SystemExit("bad bytes were taken for a message")
print(api_implementation.Type())
"""


COMPILED = pytest.mark.skipif(
    importlib.util.find_spec("google._upb") is None, reason="protobuf has no compiled implementation for this platform"
)


@pytest.mark.parametrize("implementation", [pytest.param("upb", marks=COMPILED), "python"])
def test_bytes_that_are_no_message_are_a_codec_error(implementation):
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation}
    command = [sys.executable, "-c", PARSES_BAD_BYTES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == implementation
