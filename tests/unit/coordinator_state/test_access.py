"""Access control: roles, jobs, tokens and certificates."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.access import Access, Grant, read_grants
from ferrorpc_coordinator.state.effects import Note
from ferrorpc_coordinator.state.events import UNKNOWN_CALLER, Called, Caller, Connected, Received
from ferrorpc_coordinator.state.settings import SECOND

from ferrorpc.errors import AuthenticationError, ConfigError, ErrorCode, PermissionDeniedError
from ferrorpc.v1 import error_pb2, session_pb2, store_pb2
from ferrorpc.wire.identity import EVERY_JOB, Identity, Role, identities, label
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import join

OBSERVER, WORKER, OTHER, ADMIN = (f"the-token-of-{who}" for who in ("observer", "worker", "other", "admin"))
FILE = f"observer {OBSERVER}\n# a comment\nworker@a {WORKER}  # of a\n\nworker@b {OTHER}\nadmin@a {ADMIN}\n"


def caller(*found: tuple[str, Role]) -> Caller:
    return Caller("ipv4:1.2.3.4:5", frozenset(Identity.of(job, role) for job, role in found))


def outcome(access: Access, who: Caller, token: str, job: str, needed: Role) -> type[Exception] | None:
    try:
        access.check(who, token, job, needed)
    except (AuthenticationError, PermissionDeniedError) as error:
        return None if token and token in str(error) else type(error)
    return None


@pytest.mark.parametrize(
    ("token", "job", "needed", "expected"),
    [
        (OBSERVER, "a", Role.OBSERVER, None),
        (OBSERVER, "b", Role.OBSERVER, None),
        (OBSERVER, "a", Role.WORKER, PermissionDeniedError),
        (WORKER, "a", Role.WORKER, None),
        (WORKER, "a", Role.OBSERVER, None),
        (WORKER, "a", Role.ADMIN, PermissionDeniedError),
        (WORKER, "b", Role.OBSERVER, PermissionDeniedError),
        (OTHER, "a", Role.WORKER, PermissionDeniedError),
        (ADMIN, "a", Role.ADMIN, None),
        (ADMIN, "b", Role.OBSERVER, PermissionDeniedError),
        ("a-guess-of-a-token", "a", Role.OBSERVER, AuthenticationError),
        ("\udcff", "a", Role.OBSERVER, AuthenticationError),
        ("", "a", Role.OBSERVER, AuthenticationError),
    ],
)
def test_a_token_is_good_for_its_job_and_role(token: str, job: str, needed: Role, expected: type[Exception] | None) -> None:
    assert outcome(Access(read_grants(FILE)), UNKNOWN_CALLER, token, job, needed) is expected


def test_a_certificate_needs_no_token_but_a_token_given_with_it_must_be_valid() -> None:
    access, holder = Access(read_grants(FILE)), caller(("a", Role.WORKER))
    assert outcome(access, holder, "", "a", Role.WORKER) is None
    assert outcome(access, holder, WORKER, "a", Role.WORKER) is None
    assert outcome(access, holder, "a-guess-of-a-token", "a", Role.WORKER) is AuthenticationError
    assert outcome(access, holder, OBSERVER, "a", Role.WORKER) is PermissionDeniedError
    assert outcome(access, holder, ADMIN, "a", Role.ADMIN) is PermissionDeniedError
    assert outcome(access, holder, "", "b", Role.OBSERVER) is PermissionDeniedError


def refusal(access: Access, who: Caller, token: str, job: str) -> str:
    with pytest.raises(PermissionDeniedError) as caught:
        access.check(who, token, job, Role.OBSERVER)
    return caught.value.message


def test_the_token_of_another_job_is_refused_by_the_names_of_both() -> None:
    access = Access(read_grants(f"worker@MyJob {WORKER}"))
    assert refusal(access, UNKNOWN_CALLER, WORKER, "My_Job") == "the token is that of worker of job MyJob, not of job 'My_Job'"


def test_a_certificate_has_only_the_hash_of_such_a_name_so_the_hash_of_the_wanted_job_is_beside_it() -> None:
    """So an administrator can compare them."""
    hashes = {job: label(job) for job in ("MyJob", "My_Job")}
    holder = Caller("ipv4:1.2.3.4:5", identities([Identity.of("MyJob", Role.WORKER).uri]))
    refused = f"the certificate is that of worker of the job with the hash {hashes['MyJob']}, not of job "
    assert refusal(Access(()), holder, "", "My_Job") == f"{refused}'My_Job' (its hash is {hashes['My_Job']})"
    assert refusal(Access(()), holder, "", "plain") == f"{refused}'plain'"


def test_a_certificate_without_our_identities_is_refused_even_without_tokens() -> None:
    assert outcome(Access(()), caller(), "", "a", Role.OBSERVER) is AuthenticationError
    assert outcome(Access(()), UNKNOWN_CALLER, "", "a", Role.ADMIN) is None
    assert outcome(Access(()), caller(("a", Role.COORDINATOR)), "", "a", Role.OBSERVER) is PermissionDeniedError
    assert outcome(Access(()), caller((EVERY_JOB, Role.WORKER)), "", "a", Role.WORKER) is None
    assert outcome(Access(()), caller(("b", Role.ADMIN), ("a", Role.WORKER)), "", "a", Role.ADMIN) is PermissionDeniedError


def test_one_token_alone_may_do_everything() -> None:
    assert read_grants(" just-one-long-token\n") == (Grant("just-one-long-token", Identity(EVERY_JOB, Role.ADMIN)),)
    assert "just-one" not in repr(read_grants("just-one-long-token"))


@pytest.mark.parametrize("length", [16, 4096])
def test_one_line_with_a_role_is_a_list_of_one(length: int) -> None:
    token = "x" * length
    assert read_grants(f"observer@a {token}\n") == (Grant(token, Identity.of("a", Role.OBSERVER)),)


def test_only_what_stands_alone_begins_a_comment() -> None:
    told = "worker a-token-with#in-it\t# a comment"
    for text in (told, f"{told}\n#another a-long-enough-token", f"#another\n  {told}"):
        assert [grant.token for grant in read_grants(text)] == ["a-token-with#in-it"]


@pytest.mark.parametrize(
    "text",
    ["", "# nothing", "short", "king a-long-enough-token", "worker", "coordinator a-long-enough-token", "worker short",
     "worker one-token-for-two\nadmin one-token-for-two", "a-long-enough-token\nanother-long-token", "worker a b c",
     "worker a-long-enough-token b", "worker@a-job-with-a-long-name", "worker " + "x" * 15, "worker " + "x" * 4097],
)  # fmt: skip
def test_a_token_file_with_errors_is_refused_without_showing_tokens(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_grants(text)
    assert not any(word in str(caught.value) for word in text.split() if word.endswith("-token"))


def test_only_a_token_for_every_job_opens_the_page() -> None:
    access = Access(read_grants(FILE))
    assert [access.observes_all_jobs(token) for token in (OBSERVER, WORKER, ADMIN, "a-guess-of-a-token")] == [True] + [
        False
    ] * 3


def test_a_refusal_is_logged_with_the_address_and_cannot_add_lines_to_the_log() -> None:
    world = World(job="a", access=Access(()))
    hello = session_pb2.Hello(protocol_version=1, job="a", name="eve\nall is well")
    effects = world.step(Connected(900, hello, caller(("b", Role.WORKER))))
    (note,) = [effect for effect in effects if isinstance(effect, Note)]
    assert note.kind == "refused"
    assert "ipv4:1.2.3.4:5" in note.text
    assert "worker of job b" in note.text
    assert "\n" not in note.text + note.job


@pytest.mark.parametrize(("hello", "spared"), [
    (session_pb2.Hello(protocol_version=1, job="a", name="x", token="a-guess-of-a-token"), True),
    (session_pb2.Hello(protocol_version=1, job="a", name="x", token=OTHER), True),
    (session_pb2.Hello(protocol_version=2, job="a", name="x"), True),
    (session_pb2.Hello(protocol_version=1, job="a", name="x", token=WORKER, resume_token="old"), False),
], ids=["a guess", "of another job", "of another version", "a member that is refused"])  # fmt: skip
def test_a_stranger_is_nobody_from_whom_a_coordinator_that_is_cut_off_hears(hello: session_pb2.Hello, spared: bool) -> None:
    """It may be on the coordinator's own host."""
    world = World(job="a", access=Access(read_grants(FILE)))
    member = world.hello("m", token=WORKER)
    world.tick(SECOND)
    member.frozen = True
    world.tick(5 * SECOND // 2)
    world.cut("m")
    for number in range(20):
        world.tick(SECOND)
        world.step(Connected(900 + number, hello, UNKNOWN_CALLER))
        world.step(Received(900 + number, session_pb2.ClientFrame(beat={}), False))  # it does not read its refusal
    assert world.coordinator.jobs["a"].members.living == spared


def remove(world: World, name: str, token: str) -> object:
    report = session_pb2.ReportRequest(removal=session_pb2.Removal(name=name, reason="it is in the way"))
    return world.replies[world.call(session_pb2.UnaryReportRequest(job=world.job, token=token, request=report))]


def test_an_observer_cannot_change_anything_by_a_unary_call() -> None:
    world = World(job="a", access=Access(read_grants(FILE)))
    world.hello("x", token=WORKER)
    status = session_pb2.StatusRequest(job="a", token=OBSERVER)
    assert isinstance(world.replies[world.call(status)], session_pb2.StatusResponse)
    write = store_pb2.StoreRequest(set=store_pb2.SetOperation(key="k", value=b"v"))
    for token, expected in ((OBSERVER, error_pb2.ErrorDetail), (WORKER, session_pb2.UnaryStoreResponse)):
        call = world.call(session_pb2.UnaryStoreRequest(job="a", token=token, request=write))
        assert isinstance(world.replies[call], expected)


def test_an_admin_removes_a_member_and_nobody_else_does() -> None:
    world = World(job="a", access=Access(read_grants(FILE)))
    for name in "xy":
        world.hello(name, token=WORKER)
    join(world, "x", "y")
    refused = remove(world, "y", WORKER)
    assert isinstance(refused, error_pb2.ErrorDetail)
    assert refused.code == ErrorCode.PERMISSION_DENIED
    assert world.clients["y"].stream is not None
    assert isinstance(remove(world, "y", ADMIN), session_pb2.UnaryReportResponse)
    assert world.clients["y"].events[-1].fenced.code == ErrorCode.STALE_GENERATION
    broken = world.clients["x"].events[-1].broken.cause
    assert broken.code == ErrorCode.PEER_LOST
    assert "an operator removed it: it is in the way" in broken.message
    for name in ("y", "nobody"):
        again = remove(world, name, ADMIN)
        assert isinstance(again, error_pb2.ErrorDetail)
        assert again.code == ErrorCode.USAGE


def test_a_worker_may_report_the_exit_of_a_process() -> None:
    world = World(job="a", access=Access(read_grants(FILE)))
    world.hello("x", token=WORKER)
    exited = session_pb2.ReportRequest(exit=session_pb2.ProcessExit(name="x", returncode=1))
    call = world.call(session_pb2.UnaryReportRequest(job="a", token=WORKER, request=exited))
    assert isinstance(world.replies[call], session_pb2.UnaryReportResponse)
    assert world.clients["x"].stream is None


def test_a_member_cannot_remove_another_over_its_session() -> None:
    world = World(job="a")
    join(world, "x", "y")
    report = session_pb2.ReportRequest(generation=1, removal=session_pb2.Removal(name="y"))
    answer = world.clients["x"].results[world.ask("x", report=report)]
    assert answer.error.code == ErrorCode.USAGE
    assert world.clients["y"].stream is not None


def test_a_session_of_another_job_is_refused_and_its_job_is_not_created() -> None:
    world = World(job="a", access=Access(read_grants(FILE)))
    world.step(Connected(900, session_pb2.Hello(protocol_version=1, job="c", name="m", token=WORKER)))
    world.step(Called(901, session_pb2.UnaryStoreRequest(job="c", token=WORKER)))
    assert set(world.coordinator.jobs) == set()


def test_the_status_of_an_unknown_job_names_only_jobs_that_the_caller_may_see() -> None:
    world = World(access=Access(read_grants(FILE)), job="a")
    world.hello("m", token=WORKER)
    for token, told in ((OTHER, "none yet"), (OBSERVER, "this coordinator: a")):
        reply = world.replies[world.call(session_pb2.StatusRequest(job="b", token=token))]
        assert isinstance(reply, error_pb2.ErrorDetail)
        assert reply.hint.endswith(told)
