"""What can go wrong while KV moves.

KvTransferError
├── HandoffError              one handoff ended otherwise than well; its message is the reason
│   ├── HandoffRefused        the target wants nothing of it
│   ├── HandoffCancelled      either side gave it up
│   └── HandoffFailed         lease, lost connection, damaged or missing bytes
├── LinkLost                  the connection of a pair cannot be made, or broke
├── BadFrame                  bytes that are no frame of ours
└── IllegalTransition         a bug: an event the handoff table does not allow
"""


class KvTransferError(Exception):
    """Root of kvtransfer's errors. The message is one line: what is wrong, what to do."""


class HandoffError(KvTransferError):
    """A handoff ended otherwise than well."""


class HandoffRefused(HandoffError):
    """The target refused the offer; nothing was read or written."""


class HandoffCancelled(HandoffError):
    """Either side gave the handoff up."""


class HandoffFailed(HandoffError):
    """The handoff could not be brought to its end."""


class LinkLost(KvTransferError):
    """The connection between a source and a target cannot be made, or broke."""


class BadFrame(KvTransferError):
    """Bytes that are no frame of ours: the stream they came on cannot be trusted further."""


class IllegalTransition(KvTransferError):
    """An event arrived that the handoff table does not allow: a bug, never a peer's doing."""
