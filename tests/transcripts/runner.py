"""Replays a transcript: commands at the margin, and the frames that the coordinator sent in response indented below them.

    join a b world=2            commands; words with "=" are options, all others are names and values
      a b <- ...                the frames sent to these clients, in order

Commands: hello join beat freeze thaw cut resume leave exit barrier gather set get add cas wait delete keys watch report
link nccl describe status story tick pause restart drain. Each is a method below.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from ferrorpc_coordinator.state.events import Drain
from ferrorpc_coordinator.state.settings import MILLISECOND, SECOND, Settings

from ferrorpc.errors import CollectiveMismatchError, FerroError, GroupAbortedError
from ferrorpc.v1 import barrier_pb2, error_pb2, nccl_pb2, rendezvous_pb2, session_pb2, store_pb2
from ferrorpc.wire.error_detail import detail_of
from tests.transcripts.words import error_words, frame_words, member_words
from tests.transcripts.world import World

_OPTION = re.compile(r"[a-z-]+=")
_UNITS = {"ms": MILLISECOND, "s": SECOND}
_BINDINGS = {
    "job": store_pb2.KEY_BINDING_JOB,
    "session": store_pb2.KEY_BINDING_SESSION,
    "generation": store_pb2.KEY_BINDING_GENERATION,
}


def duration(text: str) -> int:
    """ "500ms" or "2.5s", in nanoseconds."""
    unit = "ms" if text.endswith("ms") else "s"
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def replay(path: Path) -> str:
    """The transcript as it is now: the same commands and comments with the current output."""
    lines = []
    transcript = Transcript()
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines.extend(f"  {answer}" for answer in transcript.run(line))
    return "\n".join(lines) + "\n"


class Transcript:
    """One run: a world, and one method per command."""

    def __init__(self) -> None:
        self.world = World(Settings(durable=True))
        self._told = 0
        self._telling: list[str] = []

    def run(self, line: str) -> list[str]:
        """Runs one command; returns its output."""
        command, *rest = shlex.split(line)
        options = dict(word.split("=", 1) for word in rest if _OPTION.match(word))
        words = [word for word in rest if not _OPTION.match(word)]
        action: Callable[[list[str], dict[str, str]], None] = getattr(self, f"do_{command.replace('-', '_')}")
        action(words, options)
        telling, self._telling = self._telling, []
        return telling + self._seen()

    def _seen(self) -> list[str]:
        """The frames that were sent; the same frame to several clients in a row is one line."""
        lines: list[tuple[list[str], str]] = []
        for name, frame in self.world.take():
            text = frame_words(frame)
            if lines and lines[-1][1] == text:
                lines[-1][0].append(name)
            else:
                lines.append(([name], text))
        return [f"{' '.join(names)} <- {text}" for names, text in lines]

    # -- sessions ------------------------------------------------------------------------------------------------------

    def do_hello(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self.world.hello(name, options.get("host", ""), instance=options.get("instance", "1"))

    def do_resume(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self.world.hello(name, resume=True)

    def do_cut(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self.world.cut(name)

    def do_freeze(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self.world.clients[name].frozen = True

    def do_thaw(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self.world.clients[name].frozen = False

    def do_beat(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            client = self.world.clients[name]
            client.step, client.activity = int(options.get("step", "0")), options.get("activity", "")

    def do_leave(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            self.world.ask(name, leave=rendezvous_pb2.LeaveRequest(reason=options.get("reason", "")))

    def do_exit(self, words: list[str], options: dict[str, str]) -> None:
        ended = session_pb2.ProcessExit(
            name=words[0], returncode=int(words[1]), instance_id=options.get("instance", ""), reason=options.get("reason", "")
        )
        report = session_pb2.ReportRequest(exit=ended)
        self.world.call(session_pb2.UnaryReportRequest(job=self.world.job, request=report))

    # -- membership ----------------------------------------------------------------------------------------------------

    def do_join(self, words: list[str], options: dict[str, str]) -> None:
        low, _, high = options["world"].partition(":")
        policy = rendezvous_pb2.WorldPolicy(
            min_size=int(low), max_size=int(high or low), last_call_ms=duration(options.get("last-call", "0s")) // MILLISECOND
        )
        for name in words:
            if name not in self.world.clients:
                self.world.hello(name, options.get("host", ""))
                self.world.take()
            client = self.world.clients[name]
            request = rendezvous_pb2.JoinRequest(
                policy=policy,
                after_generation=client.generation,
                pinned_rank=int(options.get("pin", "-1")),
                hinted_rank=int(options.get("hint", "-1")),
                timeout_ms=duration(options.get("timeout", "60s")) // MILLISECOND,
            )
            self.world.ask(name, join=request)

    def do_report(self, words: list[str], options: dict[str, str]) -> None:
        name, kind, *text = words
        client = self.world.clients[name]
        failure: FerroError
        if kind == "mismatch":
            failure = CollectiveMismatchError({client.rank: text[0], int(options["other"]): text[1]})
        else:
            failure = GroupAbortedError(client.rank, " ".join(text))
        generation = int(options.get("generation", client.generation))
        report = session_pb2.ReportRequest(generation=generation, failure=detail_of(failure))
        self.world.ask(name, report=report)

    def do_link(self, words: list[str], options: dict[str, str]) -> None:
        client = self.world.clients[words[0]]
        lost = session_pb2.LinkLost(peer_rank=int(words[1]), reason=words[2])
        self.world.ask(words[0], report=session_pb2.ReportRequest(generation=client.generation, link_lost=lost))

    # -- barriers and ids ----------------------------------------------------------------------------------------------

    def do_barrier(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            client = self.world.clients[name]
            request = barrier_pb2.BarrierRequest(
                generation=int(options.get("generation", client.generation)),
                name=options["name"],
                ordinal=int(options.get("ordinal", "1")),
                ranks=[int(rank) for rank in options.get("ranks", "").split(",") if rank],
                count=int(options.get("count", "0")),
                timeout_ms=duration(options.get("timeout", "30s")) // MILLISECOND,
                payload=options.get("payload", name).encode(),
            )
            self.world.ask(name, barrier=request)

    def do_nccl(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            request = nccl_pb2.CommBootstrapRequest(
                generation=self.world.clients[name].generation,
                communicator=options.get("communicator", "world"),
                attempt=int(options.get("attempt", "1")),
                unique_ids=[options["id"].encode().ljust(128, b".")] if "id" in options else [],
                failure=options.get("failure", ""),
                timeout_ms=duration(options.get("timeout", "30s")) // MILLISECOND,
            )
            self.world.ask(name, comm_bootstrap=request)

    # -- store ---------------------------------------------------------------------------------------------------------

    def _store(self, name: str, **operation: object) -> None:
        client = self.world.clients[name]
        client.request_id += 1
        request = store_pb2.StoreRequest(request_id=client.request_id, **operation)  # type: ignore[arg-type]
        self.world.ask(name, store=request)

    def do_set(self, words: list[str], options: dict[str, str]) -> None:
        binding = _BINDINGS[options.get("bind", "job")]
        self._store(words[0], set=store_pb2.SetOperation(key=words[1], value=words[2].encode(), binding=binding))

    def do_get(self, words: list[str], options: dict[str, str]) -> None:
        wait = duration(options.get("wait", "0s")) // MILLISECOND
        self._store(words[0], get=store_pb2.GetOperation(key=words[1], wait_ms=wait))

    def do_add(self, words: list[str], options: dict[str, str]) -> None:
        self._store(words[0], add=store_pb2.AddOperation(key=words[1], amount=int(words[2])))

    def do_cas(self, words: list[str], options: dict[str, str]) -> None:
        operation = store_pb2.CompareSetOperation(key=words[1], value=words[2].encode())
        operation.expected = options.get("expect", "").encode()
        operation.expect_absent = "expect" not in options
        self._store(words[0], compare_set=operation)

    def do_wait(self, words: list[str], options: dict[str, str]) -> None:
        wait = duration(options.get("wait", "5s")) // MILLISECOND
        self._store(words[0], wait=store_pb2.WaitOperation(keys=words[1:], wait_ms=wait))

    def do_delete(self, words: list[str], options: dict[str, str]) -> None:
        self._store(words[0], delete=store_pb2.DeleteOperation(key=words[1]))

    def do_keys(self, words: list[str], options: dict[str, str]) -> None:
        self._store(words[0], keys=store_pb2.KeysOperation(prefix=options.get("prefix", ""), after=options.get("after", "")))

    def do_watch(self, words: list[str], options: dict[str, str]) -> None:
        operation = store_pb2.WatchOperation(prefix=words[1], from_revision=int(options.get("from", "0")))
        self._store(words[0], watch=operation)

    # -- looking, time and the coordinator itself ----------------------------------------------------------------------

    def do_describe(self, words: list[str], options: dict[str, str]) -> None:
        self.world.ask(words[0], describe=session_pb2.DescribeRequest())

    def do_status(self, words: list[str], options: dict[str, str]) -> None:
        call = self.world.call(session_pb2.StatusRequest(job=self.world.job))
        reply = self.world.replies[call]
        if isinstance(reply, error_pb2.ErrorDetail):
            self._telling.append(error_words(reply))
            return
        assert isinstance(reply, session_pb2.StatusResponse)
        self._telling.append(f"generation {reply.position.generation}, epoch {reply.position.epoch}, {reply.store_keys} keys")
        self._telling.extend(member_words(member) for member in reply.members)
        for barrier in reply.barriers:
            arrived, missing = list(barrier.arrived_ranks), list(barrier.missing_ranks)
            self._telling.append(f"barrier {barrier.name} arrived {arrived} missing {missing}")
        for line in reply.generations:
            ended = line.end_reason or "no"
            self._telling.append(f"generation {line.generation} of {line.size}: {line.reason}; ended: {ended}")
        if reply.waiting_reason:
            self._telling.append(f"waiting: {reply.waiting_reason}")

    def do_story(self, words: list[str], options: dict[str, str]) -> None:
        """The log entries since the last `story`, and the stragglers."""
        status = self.world.coordinator.jobs[self.world.job].status()
        for entry in status.occurrences:
            if entry.number > self._told:
                about = f" [rank {entry.rank}]" if entry.rank >= 0 else ""
                self._telling.append(f"{entry.age_ms} ms ago, {entry.kind}{about}: {entry.text}")
                self._told = entry.number
        for last in status.stragglers:
            self._telling.append(f"rank {last.rank} came last to {last.barriers} barriers, waited for {last.waited_ms} ms")

    def do_tick(self, words: list[str], options: dict[str, str]) -> None:
        self.world.tick(duration(words[0]))

    def do_pause(self, words: list[str], options: dict[str, str]) -> None:
        self.world.pause(duration(words[0]))

    def do_restart(self, words: list[str], options: dict[str, str]) -> None:
        self.world.restart()

    def do_drain(self, words: list[str], options: dict[str, str]) -> None:
        self.world.step(Drain(int(words[0])))
