"""The chip NPX for hil. Boards import this package too, so it must not import hil.plugins."""

VERSION = "0.1.0"
