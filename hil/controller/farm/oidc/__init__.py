"""Login with OpenID Connect: token verification in gateways, and the device login of users."""
