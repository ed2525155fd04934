"""Routes, one module per page. :mod:`hil.controller.web.app` combines them."""
