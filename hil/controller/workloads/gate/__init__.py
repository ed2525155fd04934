"""Gate for `hil gate`: decide whether a commit makes answers wrong or programs slower."""
