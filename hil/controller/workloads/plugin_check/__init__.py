"""Check a package against the contract of hil's entry points: `hil plugin check` (docs/plugin-contract.md)."""
