"""Routes, one module per page. :mod:`hil.controller.web.server.app` combines them."""
