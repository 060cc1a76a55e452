"""The console: a page at / of the HTTP door that shows the models, sends requests, and shows live figures."""
