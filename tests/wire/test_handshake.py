"""The handshake: whoever knows the secret gets in, and nobody else, whatever is on the wire."""

import hmac
import random
import re
import struct
from dataclasses import replace

import pytest

from rankwire.errors import (
    AuthenticationError,
    ChannelClosedError,
    NoConnectionError,
    OverloadedError,
    ProtocolError,
    RendezvousError,
    VersionMismatchError,
)
from rankwire.wire import handshake
from rankwire.wire.handshake import (
    CHALLENGE_NBYTES,
    HELLO_NBYTES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    PROTOCOL_VERSION,
    VERDICT_NBYTES,
    Hello,
    Initiator,
    Purpose,
    Responder,
    Status,
    StillConnectedError,
    handshake_key,
    job_id,
    refusal,
)
from rankwire.wire.seals import Protection

SECRET = b"the secret of this job, 32 bytes"
KEY = handshake_key(SECRET)
OTHER_KEY = handshake_key(b"the secret of another job, 32 b.")
NONCE_I, NONCE_R = b"i" * NONCE_NBYTES, b"r" * NONCE_NBYTES
HELLO = Hello(Purpose.JOIN, job_id("job"), epoch=5, world_size=4, rank=2, peer=0, service=9)
MESSAGES = ("HELLO", "CHALLENGE", "PROOF", "VERDICT")


class Conversation:
    """Both ends joined in memory, with somebody on the wire who may alter each message."""

    def __init__(
        self,
        hello=HELLO,
        *,
        keys=(KEY, KEY),
        nonces=(NONCE_I, NONCE_R),
        verdict=(Status.WELCOME, 0),
        alter=lambda name, message: message,
    ):
        self.initiator = Initiator(hello, key=keys[0], nonce=nonces[0])
        self.responder = Responder(key=keys[1], nonce=nonces[1])
        self.sent = {}
        self._alter = alter
        self._verdict = verdict

    def run(self):
        """Return whom the responder has let in; both ends are content."""
        greeting = self._pass("HELLO", self.initiator.hello())
        challenge = self._pass("CHALLENGE", self.responder.challenge(greeting))
        proof = self._pass("PROOF", self.initiator.proof(challenge))
        admitted = self.responder.verify(proof)
        self.initiator.finish(self._pass("VERDICT", self.responder.verdict(*self._verdict)))
        return admitted

    def _pass(self, name, message):
        self.sent[name] = message
        return self._alter(name, message)


# -- the good way


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_handshake_succeeds_when_both_ends_have_the_secret(purpose):
    hello = Hello(purpose, job_id("job"), 2**32 - 1, 2**32 - 1, 2**32 - 2, 0, 2**64 - 1)
    assert Conversation(hello).run() == hello


def test_messages_have_fixed_sizes():
    conversation = Conversation()
    conversation.run()
    sizes = {name: len(message) for name, message in conversation.sent.items()}
    assert sizes == {"HELLO": 128, "CHALLENGE": 64, "PROOF": 32, "VERDICT": 40}
    assert list(sizes.values()) == [HELLO_NBYTES, CHALLENGE_NBYTES, PROOF_NBYTES, VERDICT_NBYTES]


def test_the_greeting_and_the_challenge_are_these_bytes():
    conversation = Conversation()
    conversation.run()
    assert conversation.sent["HELLO"] == (
        b"rankwire"
        + bytes.fromhex("0400 0100")
        + job_id("job")
        + bytes.fromhex("05000000 04000000 02000000 00000000 0900000000000000")
        + NONCE_I
        + bytes(44)
    )
    assert conversation.sent["CHALLENGE"] == (
        b"rankwire" + bytes.fromhex("0400") + bytes(22) + NONCE_R
    )


def test_the_proofs_are_macs_of_the_role_and_the_messages_before():
    conversation = Conversation(verdict=(Status.DUPLICATE_RANK, 4711))
    with pytest.raises(RendezvousError):
        conversation.run()
    said = conversation.sent["HELLO"] + conversation.sent["CHALLENGE"]
    status = struct.pack("<Q", Status.DUPLICATE_RANK | 4711 << 8)
    key = hmac.digest(SECRET, b"rankwire v3 handshake", "sha256")
    assert conversation.sent["PROOF"] == hmac.digest(key, b"I" + said, "sha256")
    assert conversation.sent["VERDICT"] == (
        status + hmac.digest(key, b"R" + said + status, "sha256")
    )


def test_the_job_travels_as_a_hash_of_its_name():
    assert len(job_id("")) == len(job_id("x" * 10_000)) == 16
    assert job_id("a") != job_id("b")
    assert job_id("größe") == job_id("größe")


def test_the_challenge_does_not_depend_on_the_secret():
    greeting = HELLO.pack(NONCE_I)
    challenges = {Responder(key=key, nonce=NONCE_R).challenge(greeting) for key in (KEY, OTHER_KEY)}
    assert len(challenges) == 1


def test_the_secret_itself_is_not_the_key():
    assert handshake_key(b"secret") != b"secret"
    assert len(handshake_key(b"secret")) == 32
    assert handshake_key(b"secret") != handshake_key(b"secreu")


# -- who is refused


@pytest.mark.parametrize("keys", [(OTHER_KEY, KEY), (KEY, OTHER_KEY)])
def test_a_dialler_with_another_secret_is_refused(keys):
    conversation = Conversation(keys=keys)
    with pytest.raises(AuthenticationError, match="did not prove"):
        conversation.run()
    assert "VERDICT" not in conversation.sent, "and is told nothing"


def test_a_listener_with_another_secret_is_refused():
    impostor = Responder(key=OTHER_KEY, nonce=NONCE_R)
    initiator = Initiator(HELLO, key=KEY, nonce=NONCE_I)
    initiator.proof(impostor.challenge(initiator.hello()))
    with pytest.raises(AuthenticationError, match="does not know the job's secret"):
        initiator.finish(impostor.verdict(Status.WELCOME))


@pytest.mark.parametrize("name", MESSAGES)
def test_any_flipped_bit_makes_one_end_refuse(name):
    size = dict(zip(MESSAGES, (128, 64, 32, 40), strict=True))[name]
    for bit in range(8 * size):

        def flip(which, message, bit=bit):
            if which != name:
                return message
            damaged = bytearray(message)
            damaged[bit // 8] ^= 1 << bit % 8
            return bytes(damaged)

        with pytest.raises((AuthenticationError, ProtocolError)):
            Conversation(alter=flip).run()


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_any_overwritten_byte_makes_one_end_refuse(name, value):
    size = dict(zip(MESSAGES, (128, 64, 32, 40), strict=True))[name]
    for index in range(size):

        def overwrite(which, message, index=index):
            if which != name or message[index] == value:
                return message
            return message[:index] + bytes([value]) + message[index + 1 :]

        conversation = Conversation(alter=overwrite)
        try:
            conversation.run()
        except (AuthenticationError, ProtocolError):
            continue
        assert conversation.sent[name][index] == value, "only an unchanged message may pass"


def test_a_proof_sent_back_proves_nothing():
    # The dialler's own proof as the listener's answer, with the status "welcome" before it.
    initiator = Initiator(HELLO, key=KEY, nonce=NONCE_I)
    stranger = Responder(key=OTHER_KEY, nonce=NONCE_R)
    proof = initiator.proof(stranger.challenge(initiator.hello()))
    with pytest.raises(AuthenticationError):
        initiator.finish(bytes(8) + proof)


def test_the_listeners_verdict_sent_back_proves_nothing():
    conversation = Conversation()
    conversation.run()
    responder = Responder(key=KEY, nonce=NONCE_R)
    responder.challenge(conversation.sent["HELLO"])
    with pytest.raises(AuthenticationError):
        responder.verify(conversation.sent["VERDICT"][8:])


@pytest.mark.parametrize("name", ["PROOF", "VERDICT"])
def test_a_recorded_proof_is_refused_under_another_nonce(name):
    overheard = Conversation()
    overheard.run()
    other_nonces = (NONCE_I, b"2" * 32) if name == "PROOF" else (b"1" * 32, NONCE_R)
    replay = Conversation(
        nonces=other_nonces,
        alter=lambda which, message: overheard.sent[name] if which == name else message,
    )
    with pytest.raises(AuthenticationError):
        replay.run()


@pytest.mark.parametrize(
    "claim",
    [
        Hello(Purpose.JOIN, job_id("job"), 5, 4, 3, 0, 9),
        Hello(Purpose.JOIN, job_id("job"), 5, 4, 0, 2, 9),
        Hello(Purpose.CALLS, job_id("job"), 5, 4, 2, 0, 9),
        Hello(Purpose.JOIN, job_id("another"), 5, 4, 2, 0, 9),
        Hello(Purpose.JOIN, job_id("job"), 6, 4, 2, 0, 9),
        Hello(Purpose.JOIN, job_id("job"), 5, 5, 2, 0, 9),
        Hello(Purpose.JOIN, job_id("job"), 5, 4, 2, 0, 8),
    ],
    ids=["rank", "swapped ranks", "purpose", "job", "epoch", "world size", "service"],
)
def test_a_proof_holds_only_for_the_greeting_it_was_made_for(claim):
    altered = Conversation(
        alter=lambda name, message: claim.pack(NONCE_I) if name == "HELLO" else message
    )
    with pytest.raises(AuthenticationError):
        altered.run()


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.WELCOME])
def test_a_refusal_cannot_be_turned_into_a_welcome(status):
    altered = Conversation(
        verdict=(status, 3),
        alter=lambda name, message: bytes(8) + message[8:] if name == "VERDICT" else message,
    )
    with pytest.raises(AuthenticationError):
        altered.run()


# -- strangers


def test_a_dialler_of_another_protocol_is_recognised():
    responder = Responder(key=KEY, nonce=NONCE_R)
    with pytest.raises(ProtocolError, match="greeting"):
        responder.challenge(b"GET / HTTP/1.1\r\nHost: x\r\n".ljust(HELLO_NBYTES))


def test_a_listener_of_another_protocol_is_recognised():
    initiator = Initiator(HELLO, key=KEY, nonce=NONCE_I)
    with pytest.raises(AuthenticationError, match="does not speak rankwire"):
        initiator.proof(b"HTTP/1.1 400 Bad Request\r\n".ljust(CHALLENGE_NBYTES))


@pytest.mark.parametrize("index", [HELLO_NBYTES - 40, HELLO_NBYTES - 1])
def test_a_greeting_with_reserved_bytes_is_refused(index):
    greeting = bytearray(HELLO.pack(NONCE_I))
    greeting[index] = 1
    with pytest.raises(ProtocolError, match="reserved"):
        Hello.unpack(bytes(greeting))


@pytest.mark.parametrize("purpose", [0, 6, 255, 65535])
def test_a_greeting_with_an_unknown_purpose_is_refused(purpose):
    greeting = bytearray(HELLO.pack(NONCE_I))
    greeting[10:12] = struct.pack("<H", purpose)
    with pytest.raises(ProtocolError, match=f"purpose {purpose}"):
        Hello.unpack(bytes(greeting))


def with_version(message, version):
    return message[:8] + struct.pack("<H", version) + message[10:]


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, 65535])
def test_a_dialler_of_another_version_is_answered_so_that_it_learns_both_and_refused(version):
    responder = Responder(key=KEY, nonce=NONCE_R)
    challenge = responder.challenge(with_version(HELLO.pack(NONCE_I), version))
    assert struct.unpack_from("<H", challenge, 8) == (PROTOCOL_VERSION,)
    assert responder.hello is None
    with pytest.raises(AuthenticationError):
        responder.verify(bytes(PROOF_NBYTES))


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, 65535])
def test_a_listener_of_another_version_is_named_with_both_versions(version):
    initiator = Initiator(HELLO, key=KEY, nonce=NONCE_I)
    challenge = Responder(key=KEY, nonce=NONCE_R).challenge(initiator.hello())
    with pytest.raises(VersionMismatchError) as caught:
        initiator.proof(with_version(challenge, version))
    assert (caught.value.ours, caught.value.theirs) == (PROTOCOL_VERSION, version)


def test_a_dialler_of_another_version_cannot_get_in_even_with_a_good_proof(monkeypatch):
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    newer = Initiator(HELLO, key=KEY, nonce=NONCE_I)
    monkeypatch.undo()
    responder = Responder(key=KEY, nonce=NONCE_R)
    proof = newer.proof(responder.challenge(newer.hello()))
    with pytest.raises(AuthenticationError):
        responder.verify(proof)


# -- refusals


def refused(status, detail, purpose):
    hello = Hello(purpose, job_id("job"), 5, 4, 2, 1)
    with pytest.raises((ConnectionError, OverloadedError)) as caught:
        Conversation(hello, verdict=(status, detail)).run()
    return caught.value


@pytest.mark.parametrize(
    ("status", "detail", "text"),
    [
        (Status.WRONG_WORLD_SIZE, 8, "world size of 8, this rank was told 4"),
        (Status.OTHER_JOB, 0, "another job"),
        (Status.INVALID_RANK, 2, "rank 2 is not one of the 2 ranks"),
        (Status.NOT_EXPECTED, 0, "formed already"),
    ],
    ids=lambda value: value.name if isinstance(value, Status) else None,
)
def test_a_refusal_says_why_by_type_and_text(status, detail, text):
    for purpose in set(Purpose) - {Purpose.LAUNCH}:
        error = refused(status, detail, purpose)
        is_joining = purpose is Purpose.JOIN
        assert type(error) is (RendezvousError if is_joining else NoConnectionError)
        assert re.search(text, str(error))


def test_a_taken_rank_and_a_second_dial_give_different_errors():
    error = refused(Status.DUPLICATE_RANK, 4711, Purpose.JOIN)
    assert type(error) is RendezvousError
    assert re.search(r"rank 2 is taken .*\(pid 4711\)", str(error))
    error = refused(Status.DUPLICATE_RANK, 4711, Purpose.MESSAGES)
    assert type(error) is StillConnectedError
    assert "rank 1 still has an earlier connection of rank 2" in str(error)


def test_the_error_for_a_wrong_certificate_names_the_expected_rank():
    for purpose in Purpose:
        error = refused(Status.WRONG_CERTIFICATE, 0, purpose)
        assert type(error) is AuthenticationError
        who = "a launcher" if purpose is Purpose.LAUNCH else "rank 2"
        assert f"not that of {who}" in str(error)


def test_the_error_for_too_many_connections_has_their_number():
    error = refused(Status.TOO_MANY_CONNECTIONS, 128, Purpose.CALLS)
    assert type(error) is OverloadedError
    assert error.peer == 1
    assert "rank 1 has 128 connections of rank 2" in str(error)


def test_the_listener_looks_up_the_key_of_the_rank_that_dials():
    asked = []

    def find(hello):
        asked.append(hello)
        return KEY if hello.rank == 2 else OTHER_KEY

    for rank in (2, 3):
        initiator = Initiator(replace(HELLO, rank=rank), key=KEY, nonce=NONCE_I)
        responder = Responder(key=find, nonce=NONCE_R)
        proof = initiator.proof(responder.challenge(initiator.hello()))
        if rank == 2:
            assert responder.verify(proof).rank == 2
        else:
            with pytest.raises(AuthenticationError):
                responder.verify(proof)
    assert [hello.rank for hello in asked] == [2, 3]


@pytest.mark.parametrize(
    ("status", "detail", "text"),
    [
        (Status.WRONG_WORLD_SIZE, 8, "the job has --nnodes 8, this launcher was told --nnodes 4"),
        (Status.INVALID_RANK, 2, "--node-rank 2 is not one of 1 to 1 (--nnodes 2)"),
        (Status.OTHER_JOB, 0, "another job listens at this address"),
    ],
    ids=lambda value: value.name if isinstance(value, Status) else None,
)
def test_a_launcher_is_refused_in_the_words_of_its_options(status, detail, text):
    error = refused(status, detail, Purpose.LAUNCH)
    assert type(error) is RendezvousError
    assert str(error) == text


def test_a_launcher_with_other_protection_gets_an_error_with_its_options():
    text = str(refused(Status.TOO_LITTLE_PROTECTION, Protection.SEALED, Purpose.LAUNCH))
    assert "give all launchers the same --master and --tls" in text
    assert "rank" not in text


@pytest.mark.parametrize("purpose", list(Purpose))
def test_another_incarnation_of_the_job_is_no_connection(purpose):
    assert type(refused(Status.OTHER_EPOCH, 0, purpose)) is NoConnectionError


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_closed_agent_is_a_closed_channel_that_names_the_peer(purpose):
    error = refused(Status.CLOSED, 0, purpose)
    assert type(error) is ChannelClosedError
    assert error.peer == 1


def test_every_status_but_welcome_is_an_error():
    for status in Status:
        if status is not Status.WELCOME:
            refused(status, 1, Purpose.MESSAGES)


def test_a_status_of_a_later_version_is_a_refusal_too():
    assert "status 200" in str(refusal(200, 0, HELLO))


@pytest.mark.parametrize("detail", [0, 1, 2**22, 2**32, 2**56 - 1])
def test_the_detail_of_a_refusal_arrives_whole(detail):
    assert f"(pid {detail})" in str(refused(Status.DUPLICATE_RANK, detail, Purpose.JOIN))


# -- fuzzing


def damaged(message, chance):
    changed = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def test_the_listener_meets_garbage_with_a_protocol_or_authentication_error_only():
    chance = random.Random("rankwire responder")
    good = HELLO.pack(NONCE_I)
    outcomes = {ProtocolError: 0, AuthenticationError: 0}
    for turn in range(20_000):
        greeting = damaged(good, chance) if turn % 2 else chance.randbytes(HELLO_NBYTES)
        if turn % 4 == 0:
            greeting = good[:10] + greeting[10:]
        responder = Responder(key=KEY, nonce=NONCE_R)
        try:
            responder.challenge(greeting)
            responder.verify(chance.randbytes(PROOF_NBYTES))
        except (ProtocolError, AuthenticationError) as error:
            outcomes[type(error)] += 1
        else:
            pytest.fail(f"let in with {greeting.hex()}")
    assert min(outcomes.values()) > 1000


def answer(challenge, verdict):
    initiator = Initiator(HELLO, key=KEY, nonce=NONCE_I)
    initiator.proof(challenge)
    initiator.finish(verdict)


def test_the_dialler_meets_garbage_with_a_protocol_or_authentication_error_only():
    chance = random.Random("rankwire initiator")
    good = Responder(key=KEY, nonce=NONCE_R).challenge(HELLO.pack(NONCE_I))
    for turn in range(5_000):
        challenge = damaged(good, chance) if turn % 2 else chance.randbytes(CHALLENGE_NBYTES)
        with pytest.raises((ProtocolError, AuthenticationError)):
            answer(challenge, chance.randbytes(VERDICT_NBYTES))
