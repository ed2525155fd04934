"""A file a page, each with its routes; :mod:`hil.controller.web.app` puts them together."""
