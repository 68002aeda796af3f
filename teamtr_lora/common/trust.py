"""What a user has said about programs that come with a dataset, by an environment variable or by --trust-programs."""

from __future__ import annotations

TRUST_PROGRAMS = "TEAMTR_LORA_TRUST_PROGRAMS"
SANDBOXED = "sandboxed"  # programs of a team from elsewhere may run where the kernel holds them
UNPROTECTED = "unprotected"  # programs may run even where it does not
