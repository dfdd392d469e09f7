"""The engines that the proxy serves: check their health, choose one for each request."""
