"""Gate for `hil gate`: decide whether a commit makes outputs wrong or programs slower."""
