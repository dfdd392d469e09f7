"""Observes requests while they are served: times, traces, logs. Independent of engines, stores and routes."""
