"""A coordinator as a child process, and a bare client for it: frames out, frames in, nothing hidden."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager

import grpc

from ferrorpc.v1 import rendezvous_pb2, session_pb2, session_pb2_grpc, store_pb2
from ferrorpc.wire import options
from ferrorpc.wire.error_detail import restore
from tests.integration import launching
from tests.integration.ports import lasting_port

START_SECONDS = 60.0


class CoordinatorProcess:
    """`python -m ferrorpc_coordinator` with the given flags; ready when constructed. It can be started anew on its address."""

    def __init__(self, *flags, listen=None, environment=None):
        self.flags = flags
        self.address = listen or f"127.0.0.1:{lasting_port()}"
        self.environment = launching.environment(**(environment or {}))
        self.start()

    def start(self):
        """Starts it, and waits until it listens."""
        # A file, not a pipe: nobody reads it meanwhile, and a process that writes to a full pipe stands still.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ferrorpc_coordinator", "--listen", self.address, *self.flags],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self.environment,
        )
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        words = line.split()
        if words[::2][:2] != ["listening", "cluster"]:
            self.process.kill()
            raise AssertionError(f"the coordinator did not start: {line!r} {self._end()}")
        self.address, self.cluster_id, *http = words[1::2]
        self.http_address = http[0] if http else None

    def again(self):
        """Another process with the same flags on the same address."""
        return CoordinatorProcess(*self.flags, listen=self.address, environment=self.environment)

    def pause(self):
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """SIGKILL."""
        self.process.kill()
        self._end()

    def stop(self, seconds=60.0):
        """SIGTERM; returns the exit code and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds), self._end()

    def log(self):
        """What it has written to stderr so far."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def _end(self, seconds=60.0):
        """Waits for the end; returns what it wrote to stderr."""
        self.process.communicate(timeout=seconds)
        if self._log.closed:
            return ""
        with self._log as log:
            log.seek(0)
            return log.read()


@contextmanager
def coordinator(*flags, **options_):
    """A running coordinator that is killed at the end."""
    process = CoordinatorProcess(*flags, **options_)
    try:
        yield process
    finally:
        process.kill()


def refused_start(*flags, environment=None):
    """Runs a coordinator that must not start; returns its exit code and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "ferrorpc_coordinator", *flags],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=launching.environment(**(environment or {})),
        check=False,
    )
    return done.returncode, done.stderr


def channel_to(address):
    """A channel with the options that sessions use."""
    return grpc.insecure_channel(address, options=options.session_channel())


class Client:
    """One Session stream. `events` collects what was pushed; `call` sends a request and waits for its result."""

    def __init__(self, address, name, *, job="job", instance=None, token="", resume="", secret="", channel=None):
        self.address, self.name, self.job = address, name, job
        self.instance = instance or f"{name}-instance"
        self.secret = secret
        self._own_channel = channel is None
        self.channel = channel or channel_to(address)
        self._outgoing = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self.results = {}
        self.events = []
        self.positions = []
        self.welcome = None
        self.ended = None
        self.sequence = 0
        hello = session_pb2.Hello(
            protocol_version=1, job=job, name=name, instance_id=self.instance, host="test", resume_token=resume, token=secret
        )
        self._outgoing.put(session_pb2.ClientFrame(hello=hello))
        self._stream = session_pb2_grpc.CoordinatorServiceStub(self.channel).Session(iter(self._outgoing.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        end = None
        try:
            for frame in self._stream:
                with self._arrived:
                    self.positions.append(frame.position)
                    body = frame.WhichOneof("body")
                    if body == "welcome":
                        self.welcome = frame.welcome
                    elif body == "result":
                        self.results[frame.result.sequence] = frame.result
                    else:
                        self.events.append(frame.event)
                    self._arrived.notify_all()
        except grpc.RpcError as error:
            end = error
        with self._arrived:
            self.ended = end or "ended"
            self._arrived.notify_all()

    def until(self, predicate, seconds=60.0):
        """Waits until `predicate()` is true; returns its value."""
        with self._arrived:
            if not self._arrived.wait_for(predicate, seconds):
                raise AssertionError(f"{self.name}: nothing for {seconds} s; {self.events=} {self.ended=}")
            return predicate()

    def greeted(self, seconds=60.0):
        """Waits for the Welcome; returns self."""
        self.until(lambda: self.welcome is not None or self.ended is not None, seconds)
        if self.welcome is None:
            raise self.ended if isinstance(self.ended, Exception) else AssertionError("the stream ended without a Welcome")
        return self

    def send(self, sequence=0, **body):
        """Sends one frame as it is."""
        self._outgoing.put(session_pb2.ClientFrame(sequence=sequence, **body))

    def begin(self, **body):
        """Sends a numbered request; returns its number."""
        self.sequence += 1
        self.send(self.sequence, **body)
        return self.sequence

    def result(self, sequence, seconds=60.0):
        """The result of a request; raises the error it carries."""
        self.until(lambda: sequence in self.results or self.ended is not None, seconds)
        if sequence not in self.results:
            raise AssertionError(f"{self.name}: the stream ended: {self.ended}")
        result = self.results[sequence]
        if result.HasField("error"):
            raise restore(result.error)
        return result

    def call(self, seconds=60.0, **body):
        """Request and result."""
        return self.result(self.begin(**body), seconds)

    def store(self, seconds=60.0, **operation):
        """One store operation; the request id is the sequence number to come."""
        request = store_pb2.StoreRequest(request_id=self.sequence + 1, **operation)
        return self.call(seconds, store=request).store

    def event(self, kind, seconds=60.0):
        """The first pushed event of this kind."""

        def found():
            return next((event for event in self.events if event.HasField(kind)), None)

        return getattr(self.until(found, seconds), kind)

    def end(self):
        """Half-closes the stream without a Leave."""
        self._outgoing.put(None)

    def drop(self):
        """Ends stream and connection, as a death would."""
        self._stream.cancel()
        if self._own_channel:
            self.channel.close()

    def __enter__(self):
        return self.greeted()

    def __exit__(self, *_):
        self.drop()


def join_request(size, *, after=0, timeout_ms=10_000, pinned=-1, hinted=-1, low=None):
    """A JoinRequest for a world of `size`."""
    policy = rendezvous_pb2.WorldPolicy(min_size=low or size, max_size=size)
    return rendezvous_pb2.JoinRequest(
        policy=policy, after_generation=after, pinned_rank=pinned, hinted_rank=hinted, timeout_ms=timeout_ms
    )


def joined(address, count, **more):
    """`count` clients of one generation, in rank order."""
    clients = [Client(address, f"member-{number}", **more).greeted() for number in range(count)]
    numbers = [client.begin(join=join_request(count)) for client in clients]
    ranks = {client.result(number).join.rank: client for client, number in zip(clients, numbers, strict=True)}
    assert sorted(ranks) == list(range(count))
    return [ranks[rank] for rank in range(count)]
