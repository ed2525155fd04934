"""Split a console's bytes into safe lines."""

from __future__ import annotations

import time

import pytest

from hil.controller.devices.console.lines import MAX_LINE_BYTES, LineSplitter
from hil.controller.devices.console.telnet import DO, DONT, IAC, SB, SE, WILL, WONT, TelnetFilter


def split(*chunks: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\r\ntwo\nthree"], ["one", "two", "three"]),
        ([b"split ", b"line\r", b"\nnext\n"], ["split line", "next"]),
        ([b"10 %\r20 %\r\n"], ["10 %", "20 %"]),
        ([b"a\r\r\nb\r\rc\r", b"\r\n\r\rd\n"], ["a", "b", "c", "d"]),
        ([b"\n\r\n   \n"], []),
        ([b"caf\xc3\xa9 \xff\n"], ["café \\xff"]),
        ([b"\x1b[1;31mred\x1b[0m\n"], ["red"]),
        ([b"\x1b]0;title\x07text\n", b"\x1b]2;open title\n"], ["text"]),
        ([b"\x1bP1$q\x1b\\a\x1b(Bb\x1bcc\n"], ["abc"]),
        ([b"bell\x07 back\x08\n"], ["bell\\x07 back\\x08"]),
        (["\u202eevil\n".encode()], ["\\u202eevil"]),
        ([b"tab\there\n"], ["tab\there"]),
    ],
)
def test_splitter_returns_clean_lines(chunks, lines):
    assert split(*chunks) == lines


def test_splitter_cuts_long_lines():
    lines = split(*[b"x" * 1000] * 10)
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 10_000 - 2 * MAX_LINE_BYTES]


@pytest.mark.parametrize("data", [b"\r" * 65536, b"\x1b]" * 32768, b"\x1b[0" + b"0" * 65536])
def test_splitter_takes_linear_time(data):
    began = time.process_time()
    split(data)
    assert time.process_time() - began < 5


def test_splitter_gives_same_lines_for_any_chunks():
    data = b"\x1b[2Jboot\r\nKernel \xe2\x82\xac panic\n\x1b]0;t\x07x\rlogin: "
    whole = split(data)
    assert whole == ["boot", "Kernel € panic", "x", "login:"]
    for size in range(1, len(data)):
        assert split(*[data[at : at + size] for at in range(0, len(data), size)]) == whole


def test_telnet_filter_removes_commands_and_answers_options():
    telnet = TelnetFilter()
    data = bytes([IAC, WILL, 1, IAC, WILL, 3, IAC, DO, 31, IAC, WILL, 44]) + b"a" + bytes([IAC, IAC]) + b"b\r\0c\r\n"
    text, answer = telnet.receive(data)
    assert text == b"a\xffb\rc\r\n"
    assert answer == bytes([IAC, DO, 1, IAC, DO, 3, IAC, WONT, 31, IAC, DONT, 44])


def test_telnet_filter_never_answers_an_unchanged_option():
    telnet = TelnetFilter()
    assert telnet.receive(bytes([IAC, WILL, 1]))[1] == bytes([IAC, DO, 1])
    assert telnet.receive(bytes([IAC, WILL, 1]))[1] == b""
    assert telnet.receive(bytes([IAC, WONT, 1]))[1] == bytes([IAC, DONT, 1])
    assert telnet.receive(bytes([IAC, WONT, 1]))[1] == b""


def test_telnet_filter_skips_subnegotiation_over_chunks():
    telnet = TelnetFilter()
    chunks = [bytes([IAC]), bytes([SB, 24, 1, IAC]), bytes([IAC, 2, IAC]), bytes([SE]) + b"text"]
    assert [telnet.receive(chunk)[0] for chunk in chunks] == [b"", b"", b"", b"text"]


def test_telnet_filter_ends_endless_subnegotiation():
    telnet = TelnetFilter()
    telnet.receive(bytes([IAC, SB]) + b"x" * 5000)
    assert telnet.receive(b"text")[0] == b"text"


def test_telnet_send_escapes_command_byte():
    assert TelnetFilter.send(b"a\xffb") == b"a\xff\xffb"
