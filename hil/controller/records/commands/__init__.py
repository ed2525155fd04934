"""Types of the documents that commands print with ``--json``. ``hil.controller.cli.screen.answer`` adds ``schema``."""
