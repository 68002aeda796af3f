"""Whom to trust: what a user has said about programs that come with a dataset (by an environment variable or by
--trust-programs), and which hosts are this machine."""

from __future__ import annotations

import ipaddress

TRUST_PROGRAMS = "TEAMTR_LORA_TRUST_PROGRAMS"
SANDBOXED = "sandboxed"  # programs of a team from elsewhere may run where the kernel holds them
UNPROTECTED = "unprotected"  # programs may run even where it does not


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
