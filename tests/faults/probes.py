"""What scanners and lost clients of other protocols say to any open port: a fixed corpus."""

import random
import struct

from rankwire.wire.handshake import Hello, Purpose, job_id

_noise = random.Random("probes").randbytes


def _tls_client_hello(version: bytes) -> bytes:
    body = version + _noise(32) + b"\x00" + b"\x00\x04\x13\x01\x13\x02" + b"\x01\x00" + b"\x00\x00"
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake


def _hello(**changed: int) -> bytes:
    fields = {"epoch": 0, "world_size": 2, "rank": 1, "peer": 0, **changed}
    return Hello(Purpose.JOIN, job_id("default"), **fields).pack(bytes(32))


_GOOD = _hello()

PROBES: dict[str, bytes] = {
    # the web
    "http get": b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: Mozilla/5.0 zgrab/0.x\r\n\r\n",
    "http head 1.0": b"HEAD / HTTP/1.0\r\n\r\n",
    "http options": b"OPTIONS / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http post": b"POST /api HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}",
    "http connect": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    "http long": b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "http2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "prometheus": b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n",
    "websocket": b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "rtsp": b"OPTIONS / RTSP/1.0\r\n\r\n",
    "sip": b"OPTIONS sip:nm SIP/2.0\r\nVia: SIP/2.0/TCP nm;branch=foo\r\n\r\n",
    # encryption
    "tls 1.2 hello": _tls_client_hello(b"\x03\x03"),
    "tls 1.0 hello": _tls_client_hello(b"\x03\x01"),
    "tls truncated": _tls_client_hello(b"\x03\x03")[:20],
    "tls alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "sslv2 hello": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + _noise(36),
    # shells and desktops
    "ssh banner": b"SSH-2.0-OpenSSH_9.6\r\n",
    "ssh scanner": b"SSH-2.0-Go\r\n" + _noise(64),
    "telnet": b"\xff\xfb\x1f\xff\xfb\x20\xff\xfb\x18\xff\xfb\x27\xff\xfd\x01",
    "rdp": bytes.fromhex("030000130ee000000000000100080003000000"),
    "vnc": b"RFB 003.008\n",
    "x11": b"l\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    "adb": b"CNXN\x00\x00\x00\x01\x00\x10\x00\x00" + _noise(12) + b"host::\x00",
    # files and directories
    "smb1": b"\x00\x00\x00\x85\xffSMBr" + bytes(4) + b"\x18\x53\xc8" + bytes(26) + _noise(90),
    "smb2": b"\x00\x00\x00\x66\xfeSMB\x40" + bytes(97),
    "ftp": b"USER anonymous\r\n",
    "smtp": b"EHLO probe\r\n",
    "pop3": b"CAPA\r\n",
    "imap": b"a001 CAPABILITY\r\n",
    "ldap": bytes.fromhex("300c0201016007020103040080") + b"\x00",
    "nfs null call": bytes.fromhex("80000028")
    + _noise(4)
    + bytes.fromhex("0000000000000002000186a3"),
    "dns over tcp": b"\x00\x1e\x00\x06\x01\x00\x00\x01"
    + bytes(6)
    + b"\x07version\x04bind\x00\x00\x10\x00\x03",
    # stores and brokers
    "redis ping": b"*1\r\n$4\r\nPING\r\n",
    "redis attack": b"*3\r\n$7\r\nSLAVEOF\r\n$9\r\n127.0.0.1\r\n$4\r\n6379\r\n",
    "redis huge": b"*2147483647\r\n$2147483647\r\n",
    "memcached": b"stats\r\n",
    "memcached binary": b"\x80\x0b" + bytes(22),
    "postgres": struct.pack(">II", 8, 80877103),
    "mysql": b"\x20\x00\x00\x01\x85\xa6\xff\x01\x00\x00\x00\x01\x21" + bytes(23),
    "mssql": bytes.fromhex("1201003400000000000015000601001b000102001c000c0300280004ff"),
    "oracle": b"\x00\x5a\x00\x00\x01\x00\x00\x00\x01\x36\x01\x2c" + _noise(78),
    "mongodb": struct.pack("<IIII", 58, 1, 0, 2004) + bytes(4) + b"admin.$cmd\x00" + _noise(27),
    "zookeeper": b"ruok",
    "kafka": struct.pack(">IHHI", 20, 18, 2, 7) + b"\x00\x06client",
    "amqp": b"AMQP\x00\x00\x09\x01",
    "mqtt": b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04test",
    "zmtp": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
    # the neighbours' own protocols
    "torch store": struct.pack("<BI", 0, 0x3C85F7CE) + struct.pack("<Q", 1 << 40),
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
    "java object": b"\xac\xed\x00\x05" + _noise(40),
    # nothing in particular
    "nmap generic lines": b"\r\n\r\n",
    "nmap help": b"HELP\r\n",
    "nmap null": b"\x00",
    "one newline": b"\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a length of 2**63": struct.pack("<Q", 1 << 63) * 32,
    "noise": _noise(4096),
    # nearly one of us
    "half a greeting": _GOOD[: len(_GOOD) // 2],
    "a greeting and noise": _GOOD + _noise(512),
    "a greeting of another version": _GOOD[:8] + b"\x63\x00" + _GOOD[10:],
    "a greeting of a rank outside": _hello(rank=2**32 - 1) + _noise(64),
    "two greetings": _GOOD + _GOOD,
}
