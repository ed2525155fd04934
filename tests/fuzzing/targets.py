"""All fuzzers, by name."""

from __future__ import annotations

from fuzzing import agent, channel, files, gateway, liar, texts
from fuzzing.engine import Fuzzer

FUZZERS: dict[str, Fuzzer] = {
    one.name: one for one in (agent.FUZZER, gateway.FUZZER, channel.FUZZER, liar.FUZZER, *files.FUZZERS, *texts.FUZZERS)
}
