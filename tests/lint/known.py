"""Faults that were there when their rule was made. A list may only shrink: a rule fails when an entry is obsolete."""

from __future__ import annotations

FAULTS_KILLED_OUTSIDE_CORE = frozenset({  # seeded faults, by name
    "a laptop that has moved is locked out of its fleet's machines",
    "a request that waits for room counts as a machine",
    "a worker stays at the address that its host has lost",
    "down believes a removal that was refused",
    "down leaves what a fleet had besides machines",
    "hosts are leaks while their dispatcher's region does not answer",
    "leaks removes what was not shown",
    "one region that refuses hides all others",
    "the way to end a fleet names it as the cloud does",
    "what a fleet has that is being made is a leak",
    "what a living fleet has is a leak",
    "what another laptop is just making is removed",
    "who may not remove something is asked again for ever",
    "who refuses a connection cannot be reached",
})
