"""Control messages: making grants, probes and probe answers for the wire, and delivering received ones to the mailbox."""

from __future__ import annotations

from typing import Final

from ferrorpc.errors import CodecError, LimitExceededError
from ferrorpc.transports.mailbox import Mailbox, Standing
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.frames import SIGNATURE_BYTES_MAX, Key

CONTROL_MAX: Final = 16_384
"""At most so many control messages wait to be written to a peer. A correct peer never reaches it, because it waits for most of
them. Only a peer that keeps asking and never reads makes thousands of them wait."""

_STANDINGS: Final = frozenset(transport_pb2.Standing.values()) - {transport_pb2.STANDING_UNSPECIFIED}


def too_many_unread(peer: int) -> LimitExceededError:
    """The error for a peer with more than CONTROL_MAX unread messages."""
    return LimitExceededError(f"rank {peer} leaves {CONTROL_MAX} answers to it unread", limit="CONTROL_MAX")


def grant_message(key: Key, slot: int) -> transport_pb2.Grant:
    """Allows the rest of message `slot` to be sent."""
    return transport_pb2.Grant(group=key.group, stream=key.stream, number=key.number, slot=slot)


def probe_message(key: Key, signature: str) -> transport_pb2.Probe:
    """Asks a peer how far it is in this operation."""
    return transport_pb2.Probe(group=key.group, stream=key.stream, number=key.number, signature=signature)


def probe_answer(mailbox: Mailbox, peer: int, key: Key, signature: str) -> transport_pb2.ProbeAnswer:
    """How far this rank is in an operation, for that peer."""
    return transport_pb2.ProbeAnswer(**key._asdict(), **mailbox.standing(peer, key, signature)._asdict())


def read_probe(probe: transport_pb2.Probe, source: int) -> tuple[Key, str]:
    """The operation that a probe asks about, and its signature on the rank that asks.

    Raises:
        CodecError: the signature is too long.
    """
    if len(probe.signature) > SIGNATURE_BYTES_MAX:
        raise CodecError(f"a probe from rank {source} has a signature of {len(probe.signature)} characters")
    return Key(probe.group, probe.stream, probe.number), probe.signature


def deliver_grant(mailbox: Mailbox, source: int, grant: transport_pb2.Grant) -> None:
    """Hands a received grant to the mailbox.

    Raises:
        CodecError: more grants than any operation has messages.
    """
    mailbox.granted(source, Key(grant.group, grant.stream, grant.number), grant.slot)


def deliver_probe_answer(mailbox: Mailbox, source: int, answer: transport_pb2.ProbeAnswer) -> None:
    """Hands a received probe answer to the mailbox.

    Raises:
        CodecError: the answer is invalid.
    """
    texts = answer.signature, answer.last_signature
    if answer.standing not in _STANDINGS or max(map(len, texts)) > SIGNATURE_BYTES_MAX:
        raise CodecError(f"the answer of rank {source} to a probe is standing {answer.standing} with {texts[0][:40]!r}")
    key = Key(answer.group, answer.stream, answer.number)
    mailbox.probe_answered(source, key, Standing(answer.standing, answer.signature, answer.last_number, answer.last_signature))
