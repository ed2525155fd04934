"""`hil bisect --over`: find the part of the boards' stack that changes an answer."""
